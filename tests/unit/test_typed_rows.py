"""Rows of the ledger: their columns, their form in manifests, and rows of newer versions."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.lakehouse.errors import LedgerError
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns, parse_rows
from dlac_pipeline.lakehouse.ledger.schemas import CONSUMPTION

MOMENT = datetime(2026, 1, 2, tzinfo=UTC)
COMMITTED: dict[str, Any] = {"run": "r", "attempt": 2, "nonce": "ab", "head_after": "c1", "committed_at": MOMENT}
CHECKPOINT: dict[str, Any] = {
    **{"checkpoint_id": "c1", "parent": "c0", "step": 5, "leg": 1, "world_size": 2, "manifest_uri": "file:///m"},
    **{"losses": [0.5, 0.25], "bytes": 7, "phases": {"stall": 0.5}, "nodes": ["n1"], "adopted": "/w", "reason": "auto"},
    **{"rank_nodes": [typed_rows.NodeRanks(node="n1", ranks=2)], "interval_s": 3.5, "why": "as set", "total_steps": 9},
}
LEFT_OUT: dict[str, Any] = {"filtered": [1], "quarantined": [2], "quarantine_reasons": ["bad"]}
EXCLUDED = [typed_rows.Exclusion(source=0, where="a = 1")]
ROWS: list[typed_rows.LedgerRow] = [
    typed_rows.CheckpointRow(**COMMITTED, **CHECKPOINT),
    typed_rows.AdvanceRow(**COMMITTED, checkpoint_id="c1", position_end=9, rows_consumed=5, **LEFT_OUT),
    typed_rows.ClaimRow(**COMMITTED, replaces=1, host="n1", local="/l", store="/s", marks_commits=True, plan_ids=["p"]),
    typed_rows.ClaimRow(
        **COMMITTED, purpose="rewinds", planned=[typed_rows.PlannedSnapshot(table_uuid="u", snapshot_id=3)]
    ),
    typed_rows.ClaimRow(
        **COMMITTED, purpose="forks", origin="c", memory_of=1, memory_step=4, memory_ranks=2, memory_at=0.5
    ),
    typed_rows.LegRow(
        **COMMITTED, checkpoint_id="c1", leg=1, step=4, leg_json='{"index":1,"sources":[{"plan_id":"p"}]}'
    ),
    typed_rows.QuarantinedCheckpointRow(**COMMITTED, checkpoint_id="c1", reason="a flipped bit"),
    typed_rows.QuarantinedRowsRow(
        **COMMITTED, leg=1, source=2, path="a.parquet", row_group=3, rows=4, reason="no", positions=[5]
    ),
    typed_rows.MembershipRow(**COMMITTED, checkpoint_id="c1", leg=1, first_step=4, groups=[0, 2]),
    typed_rows.RetireRow(**COMMITTED, checkpoint_id="c0"),
    typed_rows.NameRow(**COMMITTED, checkpoint_id="c0", name="best"),
    typed_rows.NameRow(**COMMITTED, name="best"),
    typed_rows.ExportRow(**COMMITTED, checkpoint_id="c0", digest="d", bytes=3, file="w", part="model"),
    typed_rows.VerifyRow(**COMMITTED, checkpoint_id="c0", verification="v", problem="a flipped bit"),
    typed_rows.VerifyRow(**COMMITTED, checkpoint_id="c0", verification="v"),
    typed_rows.RewindRow(**COMMITTED, step=3, left_checkpoint="c1", left_step=5, exclude=EXCLUDED, why="spike"),
    typed_rows.ForkRow(**COMMITTED, checkpoint_id="c1", parent_run="p", parent_checkpoint="c", parent_step=4),
    typed_rows.FinishRow(**COMMITTED, step=5),
    typed_rows.ReplayRow(**COMMITTED, checkpoint_id="c1", key_group=1, position_end=4, first_step=5, last_step=5),
]


def test_every_kind_survives_round_trip() -> None:
    """Rows of one read equal the written ones, in all fields and columns, in order of `seq`."""
    assert {type(row) for row in ROWS} == set(typed_rows.KINDS.values()) - {typed_rows.OtherRow}
    columns = [{**row.to_columns(), "seq": seq} for seq, row in enumerate(ROWS, start=1)]
    parsed = parse_columns(columns[::-1])
    assert [row.seq for row in parsed] == list(range(1, len(ROWS) + 1))
    assert [row.to_columns() for row in parsed] == columns
    assert [replace(row, seq=0) for row in parsed] == ROWS


@settings(max_examples=30)
@given(
    st.builds(
        typed_rows.AdvanceRow,
        position_start=st.integers(0, 2**40),
        position_end=st.integers(0, 2**40),
        token_start=st.none() | st.integers(0, 2**40),
        applied=st.booleans(),
        filtered=st.lists(st.integers(0, 2**40)),
        quarantined=st.lists(st.integers(0, 2**40)),
        quarantine_reasons=st.lists(st.text()),
    )
)
def test_advances_survive_round_trip(row: typed_rows.AdvanceRow) -> None:
    """Any advance is read as written."""
    (parsed,) = parse_columns([row.to_columns()])
    assert isinstance(parsed, typed_rows.AdvanceRow)
    assert parsed.to_columns() == row.to_columns()
    assert parsed.rows_dead == row.rows_dead


def test_damaged_leg_is_named() -> None:
    """The error has the run and the seq of the row. It is raised when the leg is read."""
    (row,) = parse_columns([{"kind": "leg", "run": "r", "seq": 4, "leg_json": '{"index": '}])
    assert isinstance(row, typed_rows.LegRow)
    assert row.to_columns()["leg_json"] == '{"index": '
    with pytest.raises(LedgerError, match=r"run 'r' at seq 4"):
        _ = row.record


def test_repeated_row_is_read() -> None:
    """A row in a manifest is JSON, and has no value that its commit decides. It is read as any other."""
    for row in ROWS:
        (columns,) = json.loads(json.dumps(typed_rows.repeatable([row])))
        assert columns.keys().isdisjoint(COMMITTED)
        (read,) = parse_columns([columns])
        assert typed_rows.repeatable([read]) == typed_rows.repeatable([row])


def test_unknown_kind_is_kept() -> None:
    """A row of a kind that this version does not know has all its columns."""
    (other,) = parse_columns([{"kind": "promote", "run": "r", "seq": 1, "name": "best"}])
    assert isinstance(other, typed_rows.OtherRow)
    assert (other.to_columns()["name"], other.seq) == ("best", 1)


@pytest.mark.parametrize(
    "kind", [each for each in dict.fromkeys(typed_rows.KINDS.values()) if each is not typed_rows.OtherRow]
)
def test_every_field_has_a_column(kind: type[typed_rows.LedgerRow]) -> None:
    """No field is lost in the table: it has a column, or a field of the struct column of its kind."""
    for each in typed_rows.columns_of(kind):
        column = CONSUMPTION.find_field(each.column)
        assert each.inner is None or CONSUMPTION.find_field(f"{each.column}.{each.inner}"), (column, each)


def test_half_a_pair_is_recorded() -> None:
    """A reason with half of a surrogate pair, as a transform may raise it, is escaped. Arrow refuses such text."""
    row = typed_rows.AdvanceRow(quarantined=(1,), quarantine_reasons=("bad \ud83d",))
    (read,) = parse_columns([row.to_columns()])
    assert isinstance(read, typed_rows.AdvanceRow)
    assert read.quarantine_reasons == ["bad \\ud83d"]


def test_older_struct_has_defaults() -> None:
    """A field that the struct of a table lacks has its default: an older version may have written the table."""
    row = typed_rows.ClaimRow(run="r", seq=1, attempt=1, host="n")
    table = pa.Table.from_pylist([{"kind": "claim", "run": "r", "seq": 1, "attempt": 1, "claim": {"host": "n"}}])
    (read,) = parse_rows(table)
    assert isinstance(read, typed_rows.ClaimRow)
    assert (read.host, read.store, read.attempt) == (row.host, row.store, 1)
