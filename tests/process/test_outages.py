"""Launches during an outage of the catalog or the store: how long they wait, and what a stop reports."""

import threading
import time
from pathlib import Path

import pytest

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import OPERATOR, Request
from dlac_pipeline.supervise.supervisor import Outcome, Supervisor
from dlac_pipeline.train.startup import open_plans
from tests.small_records import small_spec

PROGRAM = Path(__file__).parents[1] / "programs" / "train_tiny.py"


def spec_without_catalog(folder: Path) -> JobSpec:
    """Return a job whose catalog is unavailable: a file is in the place of its folder."""
    (folder / "file").touch()
    unavailable = LakehouseConfig(uri=f"sqlite:///{folder}/file/catalog.db", warehouse=f"file://{folder}/warehouse")
    return small_spec(launch={"script": str(PROGRAM)}, lakehouse=unavailable.model_dump()).resolved(folder / "home")


def test_manual_start_reports_outage_at_once(tmp_path: Path) -> None:
    """A person who starts a run learns of the outage without a wait."""
    with pytest.raises(CatalogUnreachable):
        Supervisor(Request(spec=spec_without_catalog(tmp_path), noticed_by=OPERATOR)).run()


def test_recovery_waits_until_stopped(tmp_path: Path) -> None:
    """The sensor cannot read the ledger either, and has requested the run unseen. A cancelled wait is a stop, no failure."""
    supervisor = Supervisor(Request(spec=spec_without_catalog(tmp_path), noticed_by="recovery_sensor"))
    began = time.monotonic()
    threading.Timer(0.6, supervisor.stop).start()
    assert supervisor.run() == Outcome(ending="stopped", attempts=0, step=0)
    assert time.monotonic() - began >= 0.6


def test_supervised_rank_waits_like_claim(tmp_path: Path) -> None:
    """The exit of a supervised rank during the outage would fail the attempt. A rank without a supervisor fails at once."""
    spec = spec_without_catalog(tmp_path)
    place, aside = tmp_path / "file", tmp_path / "aside"
    place.unlink()
    metadata = connect(spec.lakehouse).own("consumption").metadata
    place.rename(aside)
    place.touch()
    with pytest.raises(CatalogUnreachable):
        open_plans(spec, supervised=False)

    def restore() -> None:
        place.unlink()
        aside.rename(place)

    threading.Timer(0.6, restore).start()
    assert open_plans(spec, supervised=True).lakehouse.own("consumption").metadata == metadata


def test_retry_ends_with_result_or_error() -> None:
    """The last error is raised."""
    answers = iter([CatalogUnreachable("first"), CatalogUnreachable("second")])

    def read() -> str:
        for answer in answers:
            raise answer
        return "there"

    assert retrying(60.0, of=CatalogUnreachable)(read) == "there"
    answers = iter([CatalogUnreachable("only")])
    with pytest.raises(CatalogUnreachable, match="only"):
        retrying(0.0, of=CatalogUnreachable)(read)
