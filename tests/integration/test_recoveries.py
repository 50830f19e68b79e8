from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from cachetools import LRUCache
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart
from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.extensions.upkeep.upkeep import MIN_FILES, run_upkeep
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, LedgerError
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect, equals
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import (
    PHASES,
    Recovery,
    recoveries_of,
    recoveries_to_arrow,
    write_recovery,
)
from dlac_pipeline.lakehouse.ledger.schemas import RECOVERIES
from dlac_pipeline.supervise import recovery_recorder
from dlac_pipeline.supervise.attempt_monitor import AttemptMonitor
from dlac_pipeline.supervise.failure import planned_end
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from tests.integration.test_cli import dlac
from tests.small_records import small_recovery

if TYPE_CHECKING:
    from tests.conftest import Arena

NEW = ("schedule_s", "convert_s", "work_lost_s")


def recovery(run: str, *, seq: int) -> Recovery:
    """One by a sensor onto another number of ranks: each phase took some time."""
    numbers: dict[str, Any] = {f"{phase}_s": 0.5 for phase in PHASES}
    facts = {"attempt": 3, "replaced_attempt": 2, "noticed_by": "recovery_sensor", "outcome": "failed again"}
    return small_recovery(run=run, seq=seq, rows_replayed=44, work_lost_s=7.5, **facts, **numbers)


def test_older_table_gets_new_columns(arena: Arena) -> None:
    """Its rows stay readable and do not know them; new rows have them; opening it again changes nothing."""
    old = Schema(*(field for field in RECOVERIES.fields if field.name not in NEW))
    arena.lakehouse.catalog.drop_table("dlac.recoveries")
    table = arena.lakehouse.catalog.create_table("dlac.recoveries", old, properties={"dlac.format-version": "1"})
    row = dict.fromkeys((field.name for field in old.fields), None)
    row |= {"run": "r", "seq": 1, "attempt": 2, "outcome": "resumed", "failed_at": datetime(2026, 1, 1, tzinfo=UTC)}
    table.append(pa.Table.from_pylist([row], schema=schema_to_pyarrow(old, include_field_ids=False)))
    lakehouse = connect(arena.lakehouse.config)
    evolved = lakehouse.own("recoveries")
    assert [(field.name, field.field_id) for field in evolved.schema().fields] == [
        (field.name, field.field_id) for field in RECOVERIES.fields
    ]
    (known,) = recoveries_of(lakehouse, "r")
    assert [getattr(known, name) for name in NEW] == [None] * 3
    new = recovery("r", seq=3)
    write_recovery(lakehouse, new)
    assert recoveries_of(lakehouse, "r") == [known, new]
    location = lakehouse.own("recoveries").metadata_location
    assert connect(arena.lakehouse.config).own("recoveries").metadata_location == location


@pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
def test_phases_are_recorded_in_order(arena: Arena) -> None:
    """A sensor notices, the new launch is started, and only that one waits for the end of the old processes."""
    happen = ["detect", "schedule", "stop", "claim", "verify", "convert", "load", "first step", "total"]
    claim(Ledger(arena.lakehouse), "r", nonce="n", replaces=0)
    write_recovery(arena.lakehouse, recovery("r", seq=1))
    shown = dlac("incidents", "r", home=arena.home)
    printed = " ".join(shown.stdout.split())  # a line is folded where the terminal ends
    phases = happen[:-1]  # the total is printed ahead of them
    assert [phase for _, phase in sorted((printed.index(f"{phase} 0.5 s"), phase) for phase in phases)] == phases
    (told,) = json.loads(dlac("incidents", "r", "--json", home=arena.home).stdout)
    page = model_page(arena.lakehouse, "r")
    (record,) = page["incidents"].value.records
    assert [each.data["attempt"] for each in page["last_attempts"].value.records] == [1]
    for columns in (told, record.data):
        assert [name for name in columns if name.removesuffix("_s") in PHASES] == [
            f"{phase.replace(' ', '_')}_s" for phase in happen
        ]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files of own tables that were opened since the list was cleared."""
    made, opened = own_rows.PARQUET.make_fragment, list[str]()

    def make_fragment(stream: Any) -> Any:
        opened.append(str(stream))
        return made(stream)

    monkeypatch.setattr(own_rows, "PARQUET", SimpleNamespace(make_fragment=make_fragment))
    return opened


def test_small_files_are_opened_once(arena: Arena, opened: list[str]) -> None:
    """A run with many recoveries is read with several filters in turn, and each filter needs all files."""
    files, filters = 120, [equals("outcome", name) for name in "abcdefghij"]
    table = arena.lakehouse.own("recoveries")
    table.append(recoveries_to_arrow(recovery(f"r{number}", seq=1) for number in range(files)))
    for expected in (files * len(filters), 0):
        opened.clear()
        assert [arena.lakehouse.read_own("recoveries", each).num_rows for each in filters] == [0] * len(filters)
        assert len(opened) == expected


def test_least_recent_rows_are_dropped(arena: Arena, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the rows of two filters. The rows of the third replace the least recently read ones."""
    write_recovery(arena.lakehouse, recovery("r", seq=1))
    size = own_rows.bytes_of_rows(arena.lakehouse.read_own("recoveries", equals("outcome", "")))
    monkeypatch.setattr(own_rows, "KEPT_ROWS", LRUCache(2 * size, own_rows.bytes_of_rows))
    opened.clear()
    counts = []
    for name in "abacab":
        arena.lakehouse.read_own("recoveries", equals("outcome", name))
        counts.append(len(opened))
    assert counts == [1, 2, 2, 3, 3, 4]


def test_new_recovery_needs_no_look(arena: Arena, opened: list[str]) -> None:
    """Its first append reads none of the recoveries before it. Any other one is looked for, and written once."""
    first, second = recovery("r", seq=1), replace(recovery("r", seq=2), attempt=4)
    write_recovery(arena.lakehouse, first)
    opened.clear()
    write_recovery(arena.lakehouse, second, is_new=True)
    assert opened == []
    write_recovery(arena.lakehouse, second)
    assert len(opened) == 2
    assert recoveries_of(arena.lakehouse, "r") == [first, second]


def test_upkeep_merges_recoveries(arena: Arena, opened: list[str]) -> None:
    """A reader then opens one file for each run."""
    written = [replace(recovery("r", seq=number), attempt=number) for number in range(1, MIN_FILES + 1)]
    for each in written:
        write_recovery(arena.lakehouse, each, is_new=True)
    (done,) = (each for each in run_upkeep(arena.lakehouse) if each.table == "recoveries")
    assert (done.merged_files, done.into_files) == (MIN_FILES, 1)
    opened.clear()
    assert recoveries_of(connect(arena.lakehouse.config), "r") == written
    assert len(opened) == 1


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
    """A row that cannot be written is a warning in its place."""
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r")), list[dict[str, Any]]()

    def refuse(lakehouse: Lakehouse) -> Recovery:
        raise LedgerError("the ledger is damaged")

    def wait(lakehouse: Lakehouse) -> Recovery:
        answers.wait(20)
        return recovery("r", seq=1)

    for build in (wait, refuse, lambda _: replace(recovery("r", seq=2), attempt=4)):
        recorder.record(build, lambda row: {"event": "recovered", "attempt": row.attempt}, events.append)
    answers.set()
    recorder.close()
    assert [each.get("attempt", each["event"]) for each in events] == [3, "warning", 4]
    assert events[1]["message"] == "the recovery could not be recorded: the ledger is damaged"
    assert [each.attempt for each in recoveries_of(arena.lakehouse, "r")] == [3, 4]


def test_outage_ends_wait_for_rows(arena: Arena, answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that ends during an outage does not wait for long, and warns."""
    monkeypatch.setattr(recovery_recorder, "_CLOSE_WITHIN_S", 0.1)
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r")), list[dict[str, Any]]()
    end_recovery(arena, recorder, events)
    recorder.close()
    answers.set()
    assert [each["event"] for each in events] == ["warning"]
    assert "could not be recorded" in events[0]["message"]
    for thread in threading.enumerate():
        if thread.name == "recoveries":
            thread.join(20)  # it writes no other row
            assert not thread.is_alive()


def test_stop_request_shortens_the_wait(
    arena: Arena, answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender kills the supervisor soon."""
    monkeypatch.setattr(recovery_recorder, "_STOPPED_WITHIN_S", 0.1)
    stop = threading.Event()
    stop.set()
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r"), stop=stop), list[dict[str, Any]]()
    end_recovery(arena, recorder, events)
    began = time.monotonic()
    recorder.end_attempt()
    recorder.close()
    assert time.monotonic() < began + 2
    answers.set()
    assert "found no answer of the catalog" in events[0]["message"]


def test_unexpected_error_is_warning(arena: Arena) -> None:
    """A run that has ended well must not fail because of the record of its recovery. Later rows are written."""
    recorder, events = BackgroundRecorder(arena.lakehouse, arena.spec("r")), list[dict[str, Any]]()

    def fail(lakehouse: Lakehouse) -> Recovery:
        raise TypeError("unknown column")

    for build in (fail, lambda _: recovery("r", seq=1)):
        recorder.record(build, lambda row: {"event": "recovered"}, events.append)
    recorder.close()
    assert [each["event"] for each in events] == ["warning", "recovered"]
    assert events[0]["message"] == "the recovery could not be recorded: TypeError: unknown column"
