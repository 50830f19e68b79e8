"""Rows of the ledger: their columns, their JSON, and rows of older and newer versions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlac_pipeline.lakehouse.errors import LedgerError
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    KINDS,
    AdvanceRow,
    CheckpointRow,
    ClaimRow,
    Columns,
    Exclusion,
    ExportRow,
    FinishRow,
    ForkRow,
    LedgerRow,
    LegRow,
    MembershipRow,
    NameRow,
    OtherRow,
    PlannedSnapshot,
    QuarantinedCheckpointRow,
    QuarantinedRowsRow,
    RetireRow,
    RewindRow,
    VerifyRow,
)

COMMITTED: dict[str, Any] = {
    "run": "r",
    "attempt": 2,
    "nonce": "ab",
    "head_after": "c1",
    "committed_at": datetime(2026, 1, 2, tzinfo=UTC),
}
ROWS: list[LedgerRow] = [
    CheckpointRow(
        **COMMITTED,
        checkpoint_id="c1",
        parent="c0",
        step=5,
        leg=1,
        world_size=2,
        manifest_uri="file:///m",
        losses=[0.5, 0.25],
        bytes=7,
        phases={"stall": 0.5},
        nodes=["n1"],
        reason="auto",
        interval_s=3.5,
        why="as the spec says",
        total_steps=9,
    ),
    AdvanceRow(
        **COMMITTED, checkpoint_id="c1", position_end=9, rows_consumed=5, filtered=[1], quarantined=((2, "bad"),)
    ),
    ClaimRow(**COMMITTED, replaces=1, host="n1", local="/l", store="/s", marks_commits=True, plan_ids=["p"]),
    ClaimRow(**COMMITTED, purpose="rewinds", planned=[PlannedSnapshot(table_uuid="u", snapshot_id=3)]),
    ClaimRow(**COMMITTED, purpose="forks", origin={"run": "p", "checkpoint_id": "c", "step": 4}),
    LegRow(**COMMITTED, checkpoint_id="c1", leg=1, step=4, more={"index": 1, "sources": [{"plan_id": "p"}]}),
    QuarantinedCheckpointRow(**COMMITTED, checkpoint_id="c1", reason="a flipped bit"),
    QuarantinedRowsRow(**COMMITTED, leg=1, source=2, path="a.parquet", row_group=3, rows=4, reason="no", positions=[5]),
    MembershipRow(**COMMITTED, checkpoint_id="c1", leg=1, first_step=4, groups=[0, 2]),
    RetireRow(**COMMITTED, checkpoint_id="c0"),
    NameRow(**COMMITTED, checkpoint_id="c0", name="best"),
    NameRow(**COMMITTED, name="best"),
    ExportRow(**COMMITTED, checkpoint_id="c0", digest="d", bytes=3, file="w", part="model"),
    VerifyRow(**COMMITTED, checkpoint_id="c0", verification="v", problem="a flipped bit"),
    VerifyRow(**COMMITTED, checkpoint_id="c0", verification="v"),
    RewindRow(**COMMITTED, step=3, left="c1", left_step=5, exclude=[Exclusion(source=0, where="a = 1")], why="spike"),
    ForkRow(**COMMITTED, checkpoint_id="c1", parent_run="p", parent_checkpoint="c", parent_step=4),
    FinishRow(**COMMITTED, step=5),
]


def test_every_kind_survives_round_trip() -> None:
    """Rows of one read equal the written ones, in order of `seq`."""
    assert {type(row) for row in ROWS} == set(KINDS.values()) - {OtherRow}
    columns = [{**row.to_columns(), "seq": seq} for seq, row in enumerate(ROWS, start=1)]
    parsed = parse_columns(columns[::-1])
    assert [row.seq for row in parsed] == list(range(1, len(ROWS) + 1))
    assert [row.to_columns() for row in parsed] == columns
    assert [type(row) for row in parsed] == [type(row) for row in ROWS]


@given(
    st.builds(
        AdvanceRow,
        position_start=st.integers(0, 2**40),
        position_end=st.integers(0, 2**40),
        token_start=st.none() | st.integers(0, 2**40),
        applied=st.booleans(),
        filtered=st.lists(st.integers(0, 2**40)),
        quarantined=st.dictionaries(st.integers(0, 2**40), st.text()).map(lambda found: tuple(sorted(found.items()))),
    )
)
def test_advances_survive_round_trip(row: AdvanceRow) -> None:
    """Any advance is read as written."""
    (parsed,) = parse_columns([row.to_columns()])
    assert isinstance(parsed, AdvanceRow)
    assert parsed.to_columns() == row.to_columns()
    assert parsed.rows_dead == row.rows_dead


def test_damaged_detail_is_named() -> None:
    """The error has the run, the seq and the kind of the row. It is raised when a field of `detail` is read."""
    (row,) = parse_columns([{"kind": "claim", "run": "r", "seq": 4, "attempt": 2, "detail": '{"host": '}])
    assert isinstance(row, ClaimRow)
    assert row.attempt == 2
    assert row.to_columns()["detail"] == '{"host": '
    with pytest.raises(LedgerError, match=r"'claim' of run 'r' at seq 4"):
        _ = row.host


def test_parsed_fields_are_as_written() -> None:
    """Every field of a read row equals that of the written row."""
    columns = [{**row.to_columns(), "seq": seq} for seq, row in enumerate(ROWS, start=1)]
    for written, row in zip(ROWS, parse_columns(columns), strict=True):
        assert replace(row, seq=0) == written


def test_older_quarantine_of_rows_is_read() -> None:
    """Older versions gave both kinds of quarantine one name. Only a damaged checkpoint names a checkpoint."""
    unit = json.dumps({"path": "a", "row_group": 1, "rows": 2, "reason": "no", "positions": []})
    rows = parse_columns(
        [{"kind": "quarantine", "leg": 1, "detail": unit}, {"kind": "quarantine", "checkpoint_id": "c"}]
    )
    assert [type(row) for row in rows] == [QuarantinedRowsRow, QuarantinedCheckpointRow]


def test_newer_values_are_kept() -> None:
    """An unknown kind and an unknown value in `detail` are kept."""
    newer: list[Columns] = [
        {"kind": "promote", "run": "r", "seq": 1, "detail": '{"to": 3}'},
        {"kind": "claim", "detail": '{"pool": "a"}'},
    ]
    claim, other = parse_columns(newer)
    assert isinstance(other, OtherRow)
    assert (other.to_columns()["kind"], other.seq) == ("promote", 1)
    assert json.loads(claim.to_columns()["detail"])["pool"] == "a"
