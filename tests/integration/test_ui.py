"""The UI as a person sees it: a real webserver and daemon, rendered by headless Chromium; pictures for the docs on request.

`DLAC_PICTURES=docs/pictures` keeps the screenshots there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from jobs.faults import LiveRun
from jobs.local_dagster import LocalDagster
from tests.conftest import Arena, wait_until
from tests.dagster_runs import job_config, sensor_ticks, wait_for_step

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian's package of that name)"),
]
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


class Browser:
    """Renders pages of one webserver."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._folder = folder

    def text(self, path: str, *expected: str, name: str, height: int = 1000, within_s: float = 90.0) -> str:
        """The text of a page that shows all that is expected, as soon as it does; with a screenshot under `name`."""
        deadline = time.monotonic() + within_s
        while True:
            shown = re.sub(r"<(script|style).*?</\1>", "", self._run("--dump-dom", path, height), flags=re.DOTALL)
            text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown))
            missing = [words for words in expected if words not in text]
            if not missing:
                break
            assert time.monotonic() < deadline, f"{path} does not show {missing!r}, but: {text[:3000]}"
        self._run(f"--screenshot={self._folder / name}.png", path, height)
        return shown

    def _run(self, what: str, path: str, height: int) -> str:
        profile = self._folder / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        command = ["chromium", *_FLAGS, f"--user-data-dir={profile}", f"--window-size=1500,{height}"]
        command += ["--virtual-time-budget=15000", "--timeout=30000", what, f"{self._address}{path}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def lakehouse(campaign: Arena) -> Iterator[LocalDagster]:
    """A daemon on a lakehouse with a training run that was killed once and has finished."""
    dagster = LocalDagster(campaign.home)
    with dagster.running():
        spec = campaign.spec("healed", pause_s=0.05)
        live = LiveRun(spec.checkpoint.store, spec.run)
        run_id = dagster.launch("train_job", job_config(spec))
        wait_for_step(live, dagster, run_id, 40)
        assert live.kill_rank(1)
        wait_for_step(live, dagster, run_id, 70)
        assert live.kill_dagster_run()
        dagster.wait(run_id)
        assert dagster.wait(dagster.recovery_of(run_id)).status == dg.DagsterRunStatus.SUCCESS
        yield dagster


def test_a_person_finds_graph_live_run_asset_page_checks_and_ticks(
    campaign: Arena, lakehouse: LocalDagster, tmp_path: Path
) -> None:
    """Every page that the docs show renders what it is shown for."""
    pictures = Path(os.environ.get("DLAC_PICTURES", tmp_path)).resolve()
    pictures.mkdir(parents=True, exist_ok=True)
    with lakehouse.webserver() as address:
        browser = Browser(address, pictures)
        assets = ("corpus", "tokens", "pinned_snapshot", "work_plan", "model_checkpoint")
        browser.text("/asset-groups", *assets, name="graph")
        page = "/assets/model_checkpoint"
        browser.text(page, "One committed checkpoint", "ml-platform", "pytorch", "finished", name="asset")
        shown = browser.text(f"{page}?view=events", "loss_curve", "incidents", name="events", height=1800)
        assert "data:image/png;base64," in shown or "View plot" in shown or "Show Markdown" in shown
        checks = ("no_duplicate_rows", "no_missing_rows", "consumption_exact", "checkpoint_restorable")
        browser.text(f"{page}?view=checks", *checks, name="checks")
        wait_until(lambda: sensor_ticks(lakehouse, 0.0) > 0, what="a tick of the recovery sensor")
        browser.text("/locations/dlac/sensors/recovery_sensor", "recovery_sensor", "Requested", name="ticks")
        spec = campaign.spec("live", pause_s=1.0)
        run_id = lakehouse.launch("train_job", job_config(spec))
        wait_for_step(LiveRun(spec.checkpoint.store, spec.run), lakehouse, run_id, 12)
        browser.text(f"/runs/{run_id}", "model_checkpoint", "Started", "Terminate", name="live-run")
        assert lakehouse.cancel(run_id)
        assert lakehouse.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    shutil.rmtree(pictures / "profile", ignore_errors=True)
    for picture in pictures.glob("*.png"):
        assert picture.stat().st_size < 300_000, picture
