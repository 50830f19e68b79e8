"""The UI as a person sees it: a real webserver and daemon in headless Chromium. `DLAC_PICTURES=docs/pictures` keeps pictures."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import LocalDagster
from tests.browser import Page, browsing
from tests.conftest import Arena, wait_until
from tests.dagster_runs import sensor_ticks, wait_for_step

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Dagster's own libraries warn of each other
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian's package of that name)"),
]
CHECKS = ("no_duplicate_rows", "no_missing_rows", "consumption_exact", "checkpoint_restorable")
MODEL = "/assets/models/healed"


@pytest.fixture(scope="module")
def dagster(campaign: Arena) -> Iterator[LocalDagster]:
    """A daemon with two training runs as assets: the first was killed twice and has finished, the second has not begun."""
    spec = campaign.spec("healed", pause_s=0.05)
    made = LocalDagster(campaign.home)
    for each in (spec, campaign.spec("live", pause_s=1.0)):
        made.write_job_file(each)
    with made.running():
        live = LiveRun(spec.checkpoint.store, spec.run)
        run_id = made.train(spec.run)
        wait_for_step(live, made, run_id, 40)
        assert live.kill_rank(1)
        wait_for_step(live, made, run_id, 70)
        assert live.kill_dagster_run()
        made.wait(run_id)
        assert made.wait(made.recovery_of(run_id)).status == dg.DagsterRunStatus.SUCCESS
        wait_until(lambda: sensor_ticks(made, 0.0) > 0, what="a tick of the recovery sensor")
        yield made


def test_person_finds_every_page(campaign: Arena, dagster: LocalDagster, tmp_path: Path) -> None:
    """Every page that the docs show renders what it is shown for, and no picture is too large for them."""
    pictures = Path(os.environ.get("DLAC_PICTURES", tmp_path / "pictures")).resolve()
    pictures.mkdir(parents=True, exist_ok=True)
    with dagster.webserver() as address, browsing(address, tmp_path / "profile") as page:
        walk_finished(page, pictures)
        spec = campaign.spec("live", pause_s=1.0)
        run_id = dagster.train(spec.run)
        wait_for_step(LiveRun(spec.checkpoint.store, spec.run), dagster, run_id, 12)
        page.open(f"/runs/{run_id}")
        page.wait_for("Started", "Terminate", "ASSET_OBSERVATI")
        page.picture(pictures / "live-run.png")
        assert dagster.cancel(run_id)
        assert dagster.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    for picture in pictures.glob("*.png"):
        assert picture.stat().st_size < 300_000, picture


def walk_finished(page: Page, pictures: Path) -> None:
    """The pages of what has ended."""
    page.open("/locations/__repository__@dlac/asset-groups/training")
    page.wait_for("healed", "live", "4 / 4 Passed")
    page.picture(pictures / "graph.png", height=780)
    page.open(MODEL)
    page.wait_for("One model of training run", "ml-platform", "healed", "incidents", "last_checkpoints")
    page.picture(pictures / "asset.png", height=1300)
    for index, name in enumerate(("loss", "coverage", "cost")):
        page.click("[Show Markdown]", nth=index)
        wait_until(lambda: page.loaded_pictures() == 1, what=name, within_s=30)
        page.picture(pictures / f"{name}.png", height=800)
        page.click("Close")
        wait_until(lambda: page.loaded_pictures() == 0, what="the end of the dialog", within_s=30)
    page.click("Plots")
    page.wait_for("recoveries", "attempts")
    page.open(f"{MODEL}?view=checks")
    page.wait_for(*CHECKS, "Passed")
    page.picture(pictures / "checks.png")
    page.open("/locations/dlac/sensors/recovery_sensor")
    page.wait_for("recovery_sensor", "Evaluations", "requested")
    page.picture(pictures / "ticks.png")
