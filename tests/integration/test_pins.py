import json
import secrets
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ForbiddenError, RESTError
from pyiceberg.io.pyarrow import schema_to_pyarrow

from dlac_pipeline.extensions.upkeep.pins import list_pins
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.pins import hold, release_pins, remove_pin
from dlac_pipeline.lakehouse.iceberg.safe_commit import GuardedSqlCatalog
from dlac_pipeline.lakehouse.iceberg.snapshots import pin, pin_tag, snapshot_of
from dlac_pipeline.lakehouse.ledger.plans import PlanRow
from dlac_pipeline.lakehouse.ledger.schemas import CONSUMPTION, PLANS

ROWS = pa.table({"k": pa.array([1, 2, 3], pa.int64())})


@pytest.fixture
def lakehouse(lakehouse: Lakehouse) -> Lakehouse:
    """A lakehouse with an empty source table."""
    lakehouse.catalog.create_table("src.t", ROWS.schema)
    return lakehouse


def append(lakehouse: Lakehouse, name: str = "src.t") -> int:
    """Append a data file; returns the snapshot."""
    lakehouse.load(name).append(ROWS)
    return now(lakehouse, name)


def now(lakehouse: Lakehouse, name: str = "src.t") -> int:
    """The current snapshot."""
    return snapshot_of(lakehouse.load(name), None).snapshot_id


P = [f"{number:024x}" for number in range(10)]
"""Ids of plans."""


def uuid_of(lakehouse: Lakehouse, name: str = "src.t") -> str:
    """The table's uuid."""
    return str(lakehouse.load(name).metadata.table_uuid)


def plan(lakehouse: Lakehouse, snapshot_id: int, plan_id: str, table: str = "src.t") -> str:
    """Pin a snapshot and write a plan's row; returns its id."""
    tag = pin(lakehouse, table, snapshot_id)
    empty: dict[str, Any] = {"row_filter": "", "columns": "[]", "units": 0, "rows": 0, "live_rows": 0, "bytes": 0}
    source: dict[str, Any] = {
        "source_table": table,
        "table_uuid": uuid_of(lakehouse, table),
        "snapshot_id": snapshot_id,
    }
    written: dict[str, Any] = {"write_id": secrets.token_hex(4), "created_at": datetime.now(UTC)}
    row = PlanRow(plan_id=plan_id, tag=tag, schema_id=0, **source, **empty, **written)
    schema = schema_to_pyarrow(PLANS, include_field_ids=False)
    lakehouse.own("plans").append(pa.Table.from_pylist([asdict(row)], schema=schema))
    return plan_id


def ledger(lakehouse: Lakehouse, run: str, *rows: dict[str, Any]) -> None:
    """Append ledger rows of a run without the ledger. A dict under `detail` becomes JSON."""
    schema = schema_to_pyarrow(CONSUMPTION, include_field_ids=False)
    made = [{"run": run, "seq": seq, **row} for seq, row in enumerate(rows, start=len(run_rows(lakehouse, run)) + 1)]
    lakehouse.own("consumption").append(pa.Table.from_pylist(made, schema=schema))


def run_rows(lakehouse: Lakehouse, run: str) -> list[str]:
    """The kinds of a run's rows."""
    found = lakehouse.own("consumption").scan(row_filter=f"run = '{run}'").to_arrow()
    return [str(kind) for kind in found["kind"].to_pylist()]


def leg(*sources: dict[str, Any], index: int = 0, checkpoint_id: str = "c0") -> list[dict[str, Any]]:
    """Return the row of a checkpoint and the row of its leg."""
    named = {"checkpoint_id": checkpoint_id, "leg": index}
    return [
        {"kind": "checkpoint", **named},
        {"kind": "leg", **named, "leg_json": json.dumps({"sources": list(sources)})},
    ]


def source(*open_plans: str, upcoming: list[Any] | None = None) -> dict[str, Any]:
    """A source as a leg's JSON has it."""
    cuts = [{"plan_id": one, "live_plan_id": one} for one in open_plans]
    return {"name": "s", "start": {"open": cuts, "upcoming": upcoming or []}}


def test_a_pin_says_what_it_is_for(lakehouse: Lakehouse) -> None:
    """A pin names its snapshot, its plans, when it was taken, and the runs that use it. Only tags of DLAC are pins."""
    snapshot = append(lakehouse)
    plan(lakehouse, snapshot, P[1])
    plan(lakehouse, snapshot, P[2])
    ledger(lakehouse, "busy", *leg(source(P[1])))
    ledger(lakehouse, "done", *leg(source(P[2])), {"kind": "finish"})
    [found] = list_pins(lakehouse, "src.t")
    assert (found.table, found.snapshot_id, found.tag) == ("src.t", snapshot, pin_tag(snapshot))
    assert found.plan_ids == (P[1], P[2])
    assert [(use.run, use.finished, use.needed) for use in found.uses] == [("busy", False, True), ("done", True, False)]
    assert found.needed_by == ("busy",)
    assert found.pinned_at is not None
    assert found.committed_at <= found.pinned_at
    other = append(lakehouse)
    lakehouse.load("src.t").manage_snapshots().create_tag(other, "release-1").commit()
    assert len(list_pins(lakehouse, "src.t")) == 1
    pin(lakehouse, "src.t", other)
    [found] = [each for each in list_pins(lakehouse, "src.t") if each.snapshot_id != snapshot]
    assert (found.plan_ids, found.uses, found.pinned_at) == ((), (), None)


@pytest.mark.parametrize("one", [source(upcoming=[[P[1], 1]]), {"deep": [{"deeper": {"plan_ids": [P[0], P[1]]}}]}])
def test_plans_are_found_anywhere_in_a_leg(lakehouse: Lakehouse, one: dict[str, Any]) -> None:
    """Whatever the shape of a leg, the plans that it names need their pins."""
    plan(lakehouse, append(lakehouse), P[1])
    ledger(lakehouse, "busy", *leg(one))
    assert list_pins(lakehouse)[0].needed_by == ("busy",)


def test_the_snapshot_that_was_planned_last_is_needed(lakehouse: Lakehouse) -> None:
    """A leg's last planned snapshot is needed even if no plan of it is read any more: history is counted from there."""
    snapshot = append(lakehouse)
    pin(lakehouse, "src.t", snapshot)
    ledger(lakehouse, "busy", *leg({"table_uuid": uuid_of(lakehouse), "snapshot_id": snapshot}))
    assert list_pins(lakehouse, "src.t")[0].needed_by == ("busy",)


@pytest.mark.parametrize(("days", "needed_by"), [(0, ("busy",)), (2, ())])
def test_snapshot_that_a_run_may_enter_is_needed(lakehouse: Lakehouse, days: int, needed_by: tuple[str, ...]) -> None:
    """A run that follows a table may train a snapshot before a row names it, unless it is silent for a day."""
    planned, entered = append(lakehouse), append(lakehouse)
    for each in (planned, entered):
        pin(lakehouse, "src.t", each)
    rows = leg({"table_uuid": uuid_of(lakehouse), "snapshot_id": planned, "follow": "appends"})
    at = datetime.now(UTC) - timedelta(days=days)
    ledger(lakehouse, "busy", *({**row, "committed_at": at} for row in rows))
    assert [each.needed_by for each in list_pins(lakehouse, "src.t")] == [("busy",), needed_by]
    if needed_by:
        with pytest.raises(SpecInvalid, match=r"found \['busy'\]"):
            remove_pin(lakehouse, "src.t", entered)


def test_only_reachable_plans_are_needed(lakehouse: Lakehouse) -> None:
    """The last claim needs its plans until its first commit. A leg needs its plans until its checkpoints are retired."""
    for number in (1, 2):
        plan(lakehouse, append(lakehouse), P[number])
    ledger(lakehouse, "busy", *({"kind": "claim", "claim": {"plan_ids": [name]}} for name in (P[1], P[2])))
    assert [one.needed_by for one in list_pins(lakehouse)] == [(), ("busy",)]
    assert [one.uses[0].run for one in list_pins(lakehouse)] == ["busy", "busy"]
    ledger(lakehouse, "other", *leg(source(P[1])), *leg(source(P[2]), index=1, checkpoint_id="c1"))
    assert [one.needed_by for one in list_pins(lakehouse)] == [("other",), ("busy", "other")]
    ledger(lakehouse, "other", {"kind": "retire", "checkpoint_id": "c0"})
    assert [one.needed_by for one in list_pins(lakehouse)] == [(), ("busy", "other")]


def test_a_renamed_table_is_the_same(lakehouse: Lakehouse) -> None:
    """A run needs its pins under whatever name the table has; another table of the old name has none of them."""
    snapshot = append(lakehouse)
    plan(lakehouse, snapshot, P[1])
    ledger(lakehouse, "busy", *leg(source(P[1])))
    lakehouse.catalog.rename_table("src.t", "src.renamed")
    lakehouse.catalog.create_table("src.t", ROWS.schema)
    [found] = list_pins(lakehouse, "src.renamed")
    assert (found.needed_by, found.plan_ids) == (("busy",), (P[1],))
    with pytest.raises(SpecInvalid, match="busy"):
        remove_pin(lakehouse, "src.renamed", snapshot)


def test_run_releases_unneeded_pins(lakehouse: Lakehouse) -> None:
    """A run releases the pins that it has used, but no pin that it, another run or a dataset may still read."""
    snapshots = [append(lakehouse) for _ in range(6)]
    for number, snapshot in enumerate(snapshots[:5]):
        plan(lakehouse, snapshot, P[number])
    plan(lakehouse, snapshots[2], "of a dataset")
    pin(lakehouse, "src.t", snapshots[5])
    ledger(lakehouse, "other", {"kind": "claim", "claim": {"plan_ids": [], "leg_plan_ids": [P[1]]}})
    ledger(lakehouse, "r", *leg(source(P[0], P[1], P[2])), *leg(source(P[3]), index=1, checkpoint_id="c1"))
    ledger(lakehouse, "gone", *leg(source(P[4])), {"kind": "finish"})
    assert release_pins(lakehouse, "r", "src.t") == []
    ledger(lakehouse, "r", {"kind": "retire", "checkpoint_id": "c0"})
    assert release_pins(lakehouse, "r", "src.t") == [snapshots[0]]
    assert [one.snapshot_id for one in list_pins(lakehouse, "src.t")] == snapshots[1:]


def test_claimed_pin_is_taken_again(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's claim that lands between the check and the removal of the tag is found after the removal."""
    plan(lakehouse, append(lakehouse), P[0])
    ledger(lakehouse, "r", *leg(source(P[0])), {"kind": "retire", "checkpoint_id": "c0"})
    ledger(lakehouse, "r", *leg(source(), index=1, checkpoint_id="c1"))
    commit = GuardedSqlCatalog.commit_table

    def raced(self: SqlCatalog, table: Any, *rest: Any) -> Any:
        monkeypatch.undo()
        ledger(lakehouse, "other", {"kind": "claim", "claim": {"plan_ids": [P[0]]}})
        return commit(self, table, *rest)  # type: ignore[arg-type]  # the patched method's own signature

    monkeypatch.setattr(GuardedSqlCatalog, "commit_table", raced)
    assert release_pins(lakehouse, "r", "src.t") == []
    assert list_pins(lakehouse, "src.t")[0].needed_by == ("other",)


def test_what_a_pin_holds_back(lakehouse: Lakehouse) -> None:
    """Files and bytes are counted that only this pin reaches: neither a branch nor another tag."""
    first = append(lakehouse)
    for snapshot in (first, append(lakehouse)):
        pin(lakehouse, "src.t", snapshot)
    assert [(one.held_files, one.held_bytes) for one in list_pins(lakehouse, "src.t")] == [(0, 0), (0, 0)]
    table = lakehouse.load("src.t")
    sizes = {task.file.file_path: task.file.file_size_in_bytes for task in table.scan().plan_files()}
    table.delete("k > 0")
    assert [one.held_files for one in list_pins(lakehouse, "src.t")] == [0, 1]
    remove_pin(lakehouse, "src.t", first)
    [left] = list_pins(lakehouse, "src.t")
    assert (left.held_files, left.held_bytes) == (2, sum(sizes.values()))


def test_unpinning_is_refused_while_a_run_needs_it(lakehouse: Lakehouse) -> None:
    """A pin that an unfinished run needs stays, unless forced; a finished run needs nothing; twice is once."""
    snapshot = append(lakehouse)
    plan(lakehouse, snapshot, P[1])
    ledger(lakehouse, "busy", *leg(source(P[1])))
    with pytest.raises(SpecInvalid, match=r"found \['busy'\]"):
        remove_pin(lakehouse, "src.t", snapshot)
    ledger(lakehouse, "busy", {"kind": "finish"})
    assert remove_pin(lakehouse, "src.t", snapshot)
    assert not remove_pin(lakehouse, "src.t", snapshot)
    plan(lakehouse, snapshot, P[1])
    ledger(lakehouse, "next", *leg(source(P[1])))
    assert remove_pin(lakehouse, "src.t", snapshot, force=True)
    assert lakehouse.load("src.t").refs().keys() == {"main"}


@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        (ForbiddenError("no"), SpecInvalid, r'set pin = "none" .*until the snapshot is expired'),
        (RESTError("502 Bad Gateway"), CatalogUnreachable, "502 Bad Gateway"),
    ],
)
def test_a_source_that_may_only_be_read(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, refusal: Exception, error: type[Exception], message: str
) -> None:
    """A catalog or warehouse that refuses the tag is distinguished from one that is unavailable, and the error names a remedy."""
    snapshot = append(lakehouse)

    def refuse(*_: Any) -> Any:
        raise refusal

    monkeypatch.setattr(GuardedSqlCatalog, "commit_table", refuse)
    with pytest.raises(error, match=message):
        hold(lakehouse, "src.t", snapshot, "tag")
