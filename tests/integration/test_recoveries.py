from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import connect, equals
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
from tests.integration.test_cli import dlac

if TYPE_CHECKING:
    from tests.conftest import Arena

NEW = ("schedule_s", "convert_s", "work_lost_s")


def recovery(run: str, *, seq: int) -> Recovery:
    """One by a sensor onto another number of ranks: each phase took some time."""
    numbers: dict[str, Any] = {f"{phase}_s": 0.5 for phase in PHASES}
    return Recovery(
        run=run,
        seq=seq,
        attempt=3,
        replaced_attempt=2,
        cause="SIGKILL",
        noticed_by="recovery_sensor",
        failed_at=datetime(2026, 1, 2, tzinfo=UTC),
        resumed_from=None,
        resumed_step=0,
        rows_replayed=44,
        outcome="failed again",
        work_lost_s=7.5,
        **numbers,
    )


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
    claim(Ledger(arena.lakehouse), "r", nonce="n", replaces=0, detail={})
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
    made, opened = own_rows._FORMAT.make_fragment, list[str]()

    def make_fragment(stream: Any) -> Any:
        opened.append(str(stream))
        return made(stream)

    monkeypatch.setattr(own_rows, "_FORMAT", SimpleNamespace(make_fragment=make_fragment))
    return opened


def test_small_files_are_opened_once(arena: Arena, opened: list[str]) -> None:
    """A run with many recoveries is read in turns of several filters, each of which needs all files."""
    files, filters = 120, [equals("outcome", name) for name in "abcdefghij"]
    table = arena.lakehouse.own("recoveries")
    table.append(recoveries_to_arrow(recovery(f"r{number}", seq=1) for number in range(files)))
    for expected in (files * len(filters), 0):
        opened.clear()
        assert [arena.lakehouse.read_own("recoveries", each).num_rows for each in filters] == [0] * len(filters)
        assert len(opened) == expected


def test_least_recent_rows_are_dropped(arena: Arena, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the rows of two filters. The third replaces those that were not read for the longest time."""
    write_recovery(arena.lakehouse, recovery("r", seq=1))
    size = own_rows._bytes_of(arena.lakehouse.read_own("recoveries", equals("outcome", "")))
    monkeypatch.setattr(own_rows, "_ROWS", own_rows._KeptRows(2 * size))
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
