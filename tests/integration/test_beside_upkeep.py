"""Reads and a second upkeep beside an upkeep: the files that they have just looked up are deleted, and they look again."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from pyiceberg.table import Table

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.extensions.upkeep.orphans import remove_orphans
from dlac_pipeline.extensions.upkeep.pins import list_pins
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.errors import LakehouseError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.iceberg.pins import remove_pin
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.plans import find_plan
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, ExportRow, LedgerRow, LegRow
from dlac_pipeline.plan.plan import Plan
from dlac_pipeline.plan.planner import make_plan
from tests.conftest import Arena
from tests.snapshots import check_readable

RUN = "r1"
KEPT = ("plans", "work_units", "consumption")


@pytest.fixture
def plan(arena: Arena) -> Plan:
    """A plan that a run with one checkpoint uses."""
    arena.table()
    made = make_plan(arena.lakehouse, arena.spec(RUN).source)
    ledger = Ledger(arena.lakehouse)
    claim(ledger, RUN, nonce="n1", replaces=0)
    rows: list[LedgerRow] = [
        CheckpointRow(checkpoint_id="c1", step=1, leg=0),
        LegRow(checkpoint_id="c1", leg=0, leg_json=json.dumps({"sources": [{"plan_id": made.row.plan_id}]})),
        ExportRow(checkpoint_id="c1", digest="d"),
    ]
    commit_checkpoint(ledger, Attempt(run=RUN, number=1, nonce="n1"), checkpoint_id="c1", parent=None, rows=rows)
    return made


def outdated(arena: Arena) -> dict[str, Table]:
    """Return loaded DLAC tables that are outdated: others have committed since, and an upkeep has deleted the old files."""
    found = {name: arena.lakehouse.own(name) for name in KEPT}
    make_plan(arena.lakehouse, arena.spec(RUN, row_filter="even = true").source)
    claim(Ledger(arena.lakehouse), "another", nonce="x", replaces=0)
    run_upkeep(connect(arena.lakehouse.config), keep=1)
    for table in found.values():
        with pytest.raises(FileNotFoundError):
            table.scan().to_arrow()
    return found


def given(monkeypatch: pytest.MonkeyPatch, tables: dict[str, Table], *, at: int = 1) -> list[str]:
    """Let the `at`-th load of one of these tables return the given one. Return the names of all loaded tables."""
    real = Lakehouse.own
    loaded: list[str] = []

    def own(self: Lakehouse, name: str) -> Table:
        loaded.append(name)
        return tables[name] if name in tables and loaded.count(name) == at else real(self, name)

    monkeypatch.setattr(Lakehouse, "own", own)
    return loaded


def counted(lakehouse: Lakehouse) -> list[dict[str, Any]]:
    """What plain SQL finds."""
    with open_audit(lakehouse) as connection:
        return rows_of(connection, "SELECT (SELECT count(*) FROM plans), (SELECT count(*) FROM work_units)")


QUESTIONS: dict[str, Callable[[Lakehouse, Plan], Any]] = {
    "dlac audit": lambda lakehouse, _: audit_run(lakehouse, RUN),
    "dlac sql": lambda lakehouse, _: counted(lakehouse),
    "a plan": lambda lakehouse, plan: find_plan(lakehouse, plan.row.plan_id),
    "advances": lambda lakehouse, _: Ledger(lakehouse).rows(RUN, kinds=(AdvanceRow,)),
    "an export": lambda lakehouse, _: Ledger(lakehouse).export("d"),
}


def test_read_repeats_after_deleted_files(arena: Arena, plan: Plan) -> None:
    """Each table whose files are gone is read again, and the answer equals one without upkeep."""
    tables = outdated(arena)
    for name, question in QUESTIONS.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            loaded = given(monkeypatch, tables)
            found = question(arena.lakehouse, plan)
        assert any(loaded.count(table) > 1 for table in KEPT), name
        assert found == question(arena.lakehouse, plan), name


def test_unpin_during_upkeep_sees_needs(arena: Arena, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a missing file nor an overlooked run releases the pin."""
    given(monkeypatch, outdated(arena))
    with pytest.raises(SpecInvalid, match=RUN):
        remove_pin(arena.lakehouse, "src.t", plan.row.snapshot_id)


def test_lost_files_are_reported(arena: Arena, plan: Plan) -> None:
    """Files that are lost for good are an error that names the table, without the traceback of a missing file."""
    shutil.rmtree(arena.home / "warehouse" / "dlac" / "plans" / "data")
    with pytest.raises(LakehouseError, match=r"the files of table 'plans' .* restore them"):
        list_pins(arena.lakehouse)


@pytest.mark.parametrize("at", [1, *(pytest.param(at, marks=pytest.mark.soak) for at in (2, 3, 4))])
def test_concurrent_sweeps_look_again(arena: Arena, plan: Plan, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Wherever a second sweep comes in between: nothing fails, the work is done, and named files stay."""
    tables = outdated(arena)
    litter = arena.home / "warehouse" / "dlac" / "consumption" / "data" / "nobodys.parquet"
    litter.write_bytes(b"left by a commit that failed")
    loaded = given(monkeypatch, tables, at=at)
    assert remove_orphans(arena.lakehouse, "consumption").files >= 1
    assert loaded.count("consumption") >= 4
    monkeypatch.undo()
    assert not litter.exists()
    check_readable(arena.lakehouse)
