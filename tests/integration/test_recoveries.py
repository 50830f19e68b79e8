import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart
from dlac_pipeline.extensions.upkeep.upkeep import MIN_FILES, run_upkeep
from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import PHASES, Recovery, recoveries_of, write_recovery
from dlac_pipeline.supervise import recovery_recorder
from dlac_pipeline.supervise.attempt_monitor import AttemptMonitor
from dlac_pipeline.supervise.failure import planned_end
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from tests.conftest import Arena
from tests.small_records import small_recovery


def recovery(run: str, *, seq: int) -> Recovery:
    """One by a sensor onto another number of ranks: each phase took some time."""
    numbers: dict[str, Any] = {f"{phase}_s": 0.5 for phase in PHASES}
    facts = {"attempt": 3, "replaced_attempt": 2, "noticed_by": "recovery_sensor", "outcome": "failed again"}
    return small_recovery(run=run, seq=seq, rows_replayed=44, work_lost_s=7.5, **facts, **numbers)


def test_upkeep_merges_recoveries(arena: Arena) -> None:
    """The files of a run become one. A recovery that is written again is in the table once."""
    written = [replace(recovery("r", seq=number), attempt=number) for number in range(1, MIN_FILES + 1)]
    for each in written:
        write_recovery(arena.lakehouse, each, is_new=True)
    write_recovery(arena.lakehouse, written[-1])
    (done,) = (each for each in run_upkeep(arena.lakehouse) if each.table == "recoveries")
    assert (done.merged_files, done.into_files) == (MIN_FILES, 1)
    assert recoveries_of(connect(arena.lakehouse.config), "r") == written


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Event without which the ledger answers no read."""
    answers, rows = threading.Event(), Ledger.rows

    def wait_for_rows(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        answers.wait(20)
        return rows(self, *args, **kwargs)

    monkeypatch.setattr(Ledger, "rows", wait_for_rows)
    return answers


def end_recovery(arena: Arena, recorder: BackgroundRecorder, events: list[dict[str, Any]]) -> None:
    """Have a monitor observe the first new step after a failure of attempt 1."""
    for number in (1, 2):
        claim(Ledger(arena.lakehouse), "r", nonce=f"n{number}", replaces=number - 1)
    spec, point = arena.spec("r"), FreshStart(attempt=2, nonce="n2", leg="{}", leg_is_new=False, replaces=1)
    monitor = AttemptMonitor(recorder, spec.launch, events.append)
    recorder.begin(point, planned_end("it died", step=0))
    monitor.observe([RankHeartbeat(1, Phase.TRAINING, time.time(), 0, 0.0)] * 2)


def test_slow_catalog_delays_no_watch(arena: Arena, answers: threading.Event) -> None:
    """The ranks are watched while the row of a recovery is written. Its event follows the row."""
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r")), list[dict[str, Any]]()
    end_recovery(arena, recorder, events)
    recorder.publish_written()
    assert (events, recoveries_of(arena.lakehouse)) == ([], [])
    answers.set()
    recorder.close()
    assert [(each["event"], each["attempt"]) for each in events] == [("recovered", 2)]
    assert [each.outcome for each in recoveries_of(arena.lakehouse, "r")] == ["resumed"]


def test_outage_loses_no_recovery(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog that is unavailable when a recovery ends is asked again."""
    rows, outages = Ledger.rows, [CatalogUnreachable("the catalog is unavailable")]

    def fail_once(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        if outages:
            raise outages.pop()
        return rows(self, *args, **kwargs)

    monkeypatch.setattr(Ledger, "rows", fail_once)
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r")), list[dict[str, Any]]()
    end_recovery(arena, recorder, events)
    recorder.close()
    assert [each["event"] for each in events] == ["recovered"]
    assert len(recoveries_of(arena.lakehouse, "r")) == 1


@pytest.mark.parametrize("limit", ["_CLOSE_WITHIN_S", "_STOPPED_WITHIN_S"])
def test_outage_ends_wait_for_rows(arena: Arena, answers: threading.Event, limit: str) -> None:
    """A launch that ends during an outage does not wait for long, and less after a stop request. It warns."""
    arena.monkeypatch.setattr(recovery_recorder, limit, 0.1)
    stop = threading.Event()
    if limit == "_STOPPED_WITHIN_S":  # the sender of the request kills the supervisor soon
        stop.set()
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r"), stop=stop), list[dict[str, Any]]()
    end_recovery(arena, recorder, events)
    began = time.monotonic()
    if stop.is_set():
        recorder.end_attempt()
    recorder.close()
    assert time.monotonic() < began + 5
    answers.set()
    assert [each["event"] for each in events] == ["warning"]
    assert "found no answer of the catalog" in events[0]["message"]
    for thread in threading.enumerate():
        if thread.name == "recoveries":
            thread.join(20)  # it writes no other row
            assert not thread.is_alive()
