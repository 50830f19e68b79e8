from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart
from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.extensions.upkeep.upkeep import MIN_FILES, run_upkeep
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, LedgerError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import (
    PHASES,
    Recovery,
    recoveries_of,
    write_recovery,
)
from dlac_pipeline.supervise import recovery_recorder
from dlac_pipeline.supervise.attempt_monitor import AttemptMonitor
from dlac_pipeline.supervise.failure import planned_end
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from tests.fixtures import Command
from tests.small_records import small_recovery

if TYPE_CHECKING:
    from tests.conftest import Arena


def recovery(run: str, *, seq: int) -> Recovery:
    """One by a sensor onto another number of ranks: each phase took some time."""
    numbers: dict[str, Any] = {f"{phase}_s": 0.5 for phase in PHASES}
    facts = {"attempt": 3, "replaced_attempt": 2, "noticed_by": "recovery_sensor", "outcome": "failed again"}
    return small_recovery(run=run, seq=seq, rows_replayed=44, work_lost_s=7.5, **facts, **numbers)


@pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
def test_phases_are_recorded_in_order(arena: Arena, here: Command) -> None:
    """A sensor notices, the new launch is started, and only that one waits for the end of the old processes."""
    happen = ["detect", "schedule", "stop", "claim", "verify", "convert", "load", "first step", "total"]
    claim(Ledger(arena.lakehouse), "r", nonce="n", replaces=0)
    write_recovery(arena.lakehouse, recovery("r", seq=1))
    shown = here("incidents", "r", home=arena.home)
    printed = " ".join(shown.stdout.split())  # a line is folded where the terminal ends
    phases = happen[:-1]  # the total is printed ahead of them
    assert [phase for _, phase in sorted((printed.index(f"{phase} 0.5 s"), phase) for phase in phases)] == phases
    (listed,) = json.loads(here("incidents", "r", "--json", home=arena.home).stdout)
    page = model_page(arena.lakehouse, "r")
    (record,) = page["incidents"].value.records
    assert [each.data["attempt"] for each in page["last_attempts"].value.records] == [1]
    for columns in (listed, record.data):
        assert [name for name in columns if name.removesuffix("_s") in PHASES] == [
            f"{phase.replace(' ', '_')}_s" for phase in happen
        ]


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


def test_recoveries_are_recorded_in_order(arena: Arena, answers: threading.Event) -> None:
    """A row that cannot be written, for any reason, is a warning in its place."""
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r")), list[dict[str, Any]]()

    def refuse(lakehouse: Lakehouse) -> Recovery:
        raise LedgerError("the ledger is damaged")

    def fail(lakehouse: Lakehouse) -> Recovery:
        raise TypeError("unknown column")

    def wait(lakehouse: Lakehouse) -> Recovery:
        answers.wait(20)
        return recovery("r", seq=1)

    for build in (wait, refuse, fail, lambda _: replace(recovery("r", seq=2), attempt=4)):
        recorder.record(build, lambda row: {"event": "recovered", "attempt": row.attempt}, events.append)
    answers.set()
    recorder.close()
    assert [each.get("attempt", each["event"]) for each in events] == [3, "warning", "warning", 4]
    assert [each["message"] for each in events[1:3]] == [
        "the recovery could not be recorded: the ledger is damaged",
        "the recovery could not be recorded: TypeError: unknown column",
    ]
    assert [each.attempt for each in recoveries_of(arena.lakehouse, "r")] == [3, 4]


@pytest.mark.parametrize("limit", ["_CLOSE_WITHIN_S", "_STOPPED_WITHIN_S"])
def test_outage_ends_wait_for_rows(
    arena: Arena, answers: threading.Event, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A launch that ends during an outage does not wait for long, and less after a stop request. It warns."""
    monkeypatch.setattr(recovery_recorder, limit, 0.1)
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
