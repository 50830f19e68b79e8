"""How long a launch waits for a catalog or a store that is away, and what it says when it is told to stop meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import OPERATOR, Request
from dlac_pipeline.supervise.supervisor import Outcome, Supervisor
from dlac_pipeline.train.startup import open_lakehouse

PROGRAM = Path(__file__).parents[1] / "programs" / "train_tiny.py"


def spec_without_catalog(folder: Path) -> JobSpec:
    """A job whose catalog is away: a file stands where its folder should be."""
    (folder / "file").touch()
    away = LakehouseConfig(uri=f"sqlite:///{folder}/file/catalog.db", warehouse=f"file://{folder}/warehouse")
    raw = {
        "run": "r",
        "source": {"table": "src.t", "columns": ["x"]},
        "order": {"batch_size": 32},
        "launch": {"script": str(PROGRAM)},
        "lakehouse": away.model_dump(),
    }
    return parse_spec(raw, origin="the test").resolved(folder / "home")


def test_manual_start_reports_outage_at_once(tmp_path: Path) -> None:
    """A person who waits in vain learns nothing."""
    with pytest.raises(CatalogUnreachable):
        Supervisor(Request(spec=spec_without_catalog(tmp_path), noticed_by=OPERATOR)).run()


def test_recovery_waits_until_stopped(tmp_path: Path) -> None:
    """The sensor could not read the ledger either, and requested it blindly; cancelled, it has stopped and not failed."""
    supervisor = Supervisor(Request(spec=spec_without_catalog(tmp_path), noticed_by="recovery_sensor"))
    began = time.monotonic()
    threading.Timer(0.6, supervisor.stop).start()
    assert supervisor.run() == Outcome(ending="stopped", attempts=0, step=0)
    assert time.monotonic() - began >= 0.6


def test_supervised_rank_waits_like_claim(tmp_path: Path) -> None:
    """One that died meanwhile would fail the very attempt whose claim gets through; a rank of its own is told at once."""
    spec = spec_without_catalog(tmp_path)
    place, aside = tmp_path / "file", tmp_path / "aside"
    place.unlink()
    known = connect(spec.lakehouse).own("consumption").metadata
    place.rename(aside)
    place.touch()
    with pytest.raises(CatalogUnreachable):
        open_lakehouse(spec, supervised=False)

    def restore() -> None:
        place.unlink()
        aside.rename(place)

    threading.Timer(0.6, restore).start()
    assert open_lakehouse(spec, supervised=True).own("consumption").metadata == known


def test_retry_ends_with_result_or_error() -> None:
    """The last error is the one that is told."""
    answers = iter([CatalogUnreachable("first"), CatalogUnreachable("second")])

    def ask() -> str:
        for answer in answers:
            raise answer
        return "there"

    assert retrying(60.0, of=CatalogUnreachable)(ask) == "there"
    answers = iter([CatalogUnreachable("only")])
    with pytest.raises(CatalogUnreachable, match="only"):
        retrying(0.0, of=CatalogUnreachable)(ask)
