"""Time of a run by cause, over ledgers that are written here."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.audit.lakehouse_sql import rows_of
from dlac_pipeline.extensions.look.goodput import goodput_of_rows, open_rows
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    CheckpointRow,
    ClaimRow,
    FinishRow,
    LedgerRow,
    Purpose,
    QuarantinedCheckpointRow,
    VerifyRow,
)
from tests.small_records import small_recovery

pytestmark = pytest.mark.usefixtures("only_this_process")
PARTS = ("trained", "abandoned", "replayed", "checkpointing", "down", "startup", "idle", "unknown")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def moment(at_s: float) -> datetime:
    """Return a moment so many seconds after the beginning."""
    return EPOCH + timedelta(seconds=at_s)


def claim(at_s: float, attempt: int, purpose: Purpose | None = None, head: str | None = None) -> LedgerRow:
    """Return a claim. One with a purpose moves the head or leaves it."""
    return ClaimRow(committed_at=moment(at_s), attempt=attempt, purpose=purpose, origin=head, head_after=head)


def checkpoint(at_s: float, step: int, attempt: int = 1, parent: str | None = None, **facts: Any) -> LedgerRow:
    """Return a checkpoint, named by its step and attempt."""
    name = f"{step}.{attempt}"
    row = CheckpointRow(committed_at=moment(at_s), attempt=attempt, step=step, parent=parent, checkpoint_id=name)
    return replace(row, **{"reason": "steps", "head_after": name, **facts})


def recovery(failed_s: float, attempt: int, total_s: float = 0.0, outcome: str = "resumed", **facts: Any) -> Recovery:
    """Return the recovery by an attempt of the one before it, or the end of an attempt that was given up."""
    known = {"seq": attempt, "attempt": attempt, "replaced_attempt": attempt - 1, "outcome": outcome}
    known |= {"resumed_from": "20.1", "resumed_step": 20, "failed_at": moment(failed_s), "total_s": total_s}
    return small_recovery(**{**known, **facts})


def committed(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return rows as the ledger has them. A claim without a purpose leaves the head where it is."""
    found: list[LedgerRow] = []
    for seq, row in enumerate(rows, start=1):
        stays = isinstance(row, ClaimRow) and row.trains and bool(found)
        found.append(replace(row, run="r", seq=seq, head_after=found[-1].head_after if stays else row.head_after))
    return found


def spent(rows: Sequence[LedgerRow], recoveries: Sequence[Recovery] = ()) -> dict[str, float]:
    """Return the seconds by cause without zeros. Check that the parts add up exactly, and that attempts follow each other."""
    with open_rows(committed(rows), recoveries) as connection:
        (run,) = rows_of(connection, "FROM goodput")
        attempts = rows_of(connection, "FROM attempt_times ORDER BY from_at, attempt")
    assert sum(run[f"{part}_s"] for part in PARTS) == run["wall_s"]
    assert all(each[f"{part}_s"] >= 0 for each in attempts for part in PARTS)
    for each in attempts:
        length_s = (each["to_at"] - each["from_at"]) / timedelta(seconds=1)
        assert sum(float(each[f"{part}_s"]) for part in PARTS) == pytest.approx(length_s)
    assert [each["to_at"] for each in attempts[:-1]] == [each["from_at"] for each in attempts[1:]]
    return {part: float(run[f"{part}_s"]) for part in PARTS if run[f"{part}_s"]}


TRAINED = (claim(0, 1), checkpoint(15, 10), checkpoint(25, 20, parent="10.1"))
"""5 s of start-up, and 20 steps of a second each."""


def test_training_run_counts_committed_work() -> None:
    """Later steps show the duration of the first checkpoint's steps. A verification is no sign of life."""
    verified = VerifyRow(committed_at=moment(900), attempt=1, checkpoint_id="10.1", head_after="20.1")
    assert spent((*TRAINED, verified)) == {"startup": 5, "trained": 20}
    assert spent(TRAINED[:2]) == {"unknown": 15}
    assert spent(TRAINED[:1]) == {}


def test_checkpoint_stall_is_no_training() -> None:
    """Training waits for a copy, for a whole synchronous checkpoint, and for the last one until its commit."""
    phases = {"copy": 1.0, "write": 2.0, "seal": 1.0, "vote": 1.0}
    for stall, last, ends in (({"stall": 1.5}, 0.0, "steps"), ({"stall": 1.5}, 4.0, "end"), ({}, 8.0, "end")):
        rows = [claim(0, 1), checkpoint(15, 10, phases=phases | stall)]
        rows += [checkpoint(29.5 + 10, 30, parent="10.1", phases=phases | stall, reason=ends)]
        found = spent([*rows, *([FinishRow(committed_at=moment(40), attempt=1, head_after="30.1")] if last else [])])
        waits = 3.0 if ends == "steps" else 3.0 + 4.5 if stall else 8.0 + 0.5
        assert found["checkpointing"] == waits
        assert found.get("unknown", 0.0) == (4.0 if ends == "steps" else 0.0)


def test_killed_attempt_loses_uncommitted_work() -> None:
    """Down from the failure to the first step of the next attempt, in one try or in two, or until it is given up."""
    killed = (*TRAINED, claim(34, 2), checkpoint(50, 30, 2, "20.1"))
    lost = {"startup": 5, "trained": 30, "replayed": 7, "down": 8}
    assert spent(killed, [recovery(32, 2, 8, work_lost_s=7.0)]) == lost
    twice = (*TRAINED, claim(34, 2), claim(40, 3), checkpoint(55, 30, 3, "20.1"))
    again, resumed = recovery(32, 2, 6, "failed again"), recovery(38, 3, 7, work_lost_s=1.0)
    assert spent(twice, [again, resumed]) == lost | {"down": 13}
    assert spent(twice, [again]) == lost | {"down": 8, "startup": 5 + 5}
    given_up = recovery(32, 1, 1, "gave up", replaced_attempt=1)
    assert spent(TRAINED, [given_up]) == {"startup": 5, "trained": 20, "replayed": 7}
    assert spent(TRAINED[:1], [given_up]) == {"unknown": 32}
    assert spent(killed, [given_up, recovery(31, 2, 9)]) == lost | {"replayed": 6, "down": 9}
    unrecorded = (*TRAINED, claim(34, 2))
    assert spent(unrecorded) == {"startup": 5, "trained": 20, "unknown": 9}


def test_work_in_memory_is_not_lost() -> None:
    """Steps up to a state in memory are trained. In an attempt without a checkpoint they begin where its pace places them."""
    state: dict[str, Any] = {"memory_of": 1, "memory_step": 26, "memory_at": moment(31).timestamp()}
    resumed = replace(claim(34, 2), **state)
    found = spent((*TRAINED, resumed, checkpoint(50, 30, 2, "20.1")), [recovery(32, 2, 8, work_lost_s=1.0)])
    assert found == {"startup": 5, "trained": 20 + 6 + 10, "replayed": 1, "down": 8}
    twice = (*TRAINED, resumed, replace(claim(44, 3), **state), checkpoint(60, 30, 3, "20.1"))
    found = spent(twice, [recovery(32, 2, 8, "failed again", work_lost_s=1.0), recovery(42, 3, 8)])
    assert found["trained"] == 20 + 6 + 10
    unseen = (claim(0, 1), replace(claim(34, 2), **state), checkpoint(44, 30, 2), checkpoint(54, 40, 2, "30.2"))
    nothing: dict[str, Any] = {"resumed_from": None, "resumed_step": 26, "work_lost_s": 1.0}
    found = spent(unseen, [recovery(32, 2, 8, **nothing)])
    assert found == {"startup": 5, "trained": 26 + 4 + 10, "replayed": 1, "down": 8}


def test_lost_work_measures_start() -> None:
    """The training time that a failure lost shows when an attempt without a kept checkpoint began to train."""
    rows = (claim(0, 1), claim(22, 2), checkpoint(45, 10, 2), checkpoint(55, 20, 2, "10.2"))
    nothing: dict[str, Any] = {"resumed_from": None, "resumed_step": 0}
    found = spent(rows, [recovery(20, 2, 15, work_lost_s=12.0, **nothing)])
    assert found == {"startup": 8, "replayed": 12, "down": 15, "trained": 20}
    found = spent(rows, [recovery(20, 2, 15, **nothing)])
    assert found == {"startup": 20, "down": 15, "trained": 20}
    found = spent(rows, [recovery(20, 2, 15, work_lost_s=None, **nothing)])
    assert found == {"unknown": 20, "down": 15, "trained": 20}


def test_requested_stop_is_idle() -> None:
    """The run is to train again from the next claim on. After a stop for more nodes it was to train all the time."""
    rows: tuple[LedgerRow, ...] = ()
    for reason in ("SIGTERM", "left", "end"):
        stopped = (*TRAINED[:2], checkpoint(25, 20, parent="10.1", reason=reason))
        rows = (*stopped, claim(100, 2), checkpoint(120, 30, 2, "20.1"))
        assert spent(rows) == {"startup": 5 + 10, "trained": 30, "idle": 75}, reason
    slower = (*rows, checkpoint(160, 40, 2, "30.2"))
    assert spent(slower) == {"startup": 5, "trained": 20 + 20 + 40, "idle": 75}
    found = goodput_of_rows(committed(rows), [])
    assert found is not None
    assert (found["ettr"], found["ettr_at_most"]) == (30 / 45, 30 / 45)
    more_nodes = (*TRAINED[:2], checkpoint(25, 20, parent="10.1", reason="nodes"), *rows[3:])
    assert spent(more_nodes, [recovery(30, 2, 80)]) == {"startup": 5, "trained": 20 + 10, "down": 85}
    assert spent(more_nodes) == {"startup": 15, "trained": 30, "unknown": 75}


def test_rewound_and_damaged_work_is_abandoned() -> None:
    """Steps of checkpoints that are not on the surviving lineage. A rewind idles until the next launch."""
    rewound = (*TRAINED, claim(30, 2, "rewinds", "10.1"), claim(40, 3), checkpoint(55, 20, 3, "10.1"))
    kept = {"startup": 5, "trained": 20, "abandoned": 10}
    assert spent(rewound) == kept | {"startup": 10, "unknown": 5, "idle": 10}
    to_start = (*TRAINED, claim(30, 2, "rewinds"))
    assert spent(to_start) == {"startup": 5, "abandoned": 20, "unknown": 5}
    damaged = QuarantinedCheckpointRow(
        committed_at=moment(36), attempt=2, checkpoint_id="20.1", reason="digest", head_after="10.1"
    )
    rows = (*TRAINED, claim(34, 2), damaged, checkpoint(50, 20, 2, "10.1"))
    assert spent(rows, [recovery(32, 2, 8, resumed_from="10.1")]) == kept | {"replayed": 7, "down": 8}


@pytest.mark.parametrize("purpose", ["forks", "adopts"])
def test_first_checkpoint_of_others_is_idle(purpose: Purpose) -> None:
    """The steps of a second run do not count, and nothing trains until the first launch."""
    rows = (
        claim(0, 1, purpose),
        checkpoint(4, 100, phases={"write": 1.0}),
        claim(10, 2),
        checkpoint(25, 110, 2, "100.1"),
    )
    assert spent((*rows, checkpoint(35, 120, 2, "110.2"))) == {"idle": 10, "startup": 5, "trained": 20}


def test_fenced_attempt_counts_until_next_claim() -> None:
    """Of two attempts at the same time only the newer one can commit."""
    racing = (*TRAINED, claim(30, 2), checkpoint(55, 30, 2, "20.1"))
    found = spent(racing, [recovery(35, 2, 10)])
    assert found == {"startup": 5, "trained": 30, "replayed": 5, "down": 15}
    assert spent((claim(0, 1), claim(1, 2))) == {"unknown": 1}
    late_clock = (*TRAINED, claim(20, 2), checkpoint(45, 30, 2, "20.1"))
    assert spent(late_clock) == {"startup": 5 + 10, "trained": 30}


@settings(max_examples=10)  # each opens a database
@given(data=st.data())
def test_parts_always_sum_to_wall(data: st.DataObject) -> None:
    """Also with clocks that disagree, and recoveries that contradict the ledger."""
    draw = data.draw
    times = st.floats(-5, 100)
    rows: list[LedgerRow] = []
    recoveries = []
    head: str | None = None
    steps = attempt = 0
    for at_s in draw(st.lists(times, min_size=1, max_size=12)):
        kind = draw(st.sampled_from(["claim", "checkpoint", "rewind"])) if rows else "claim"
        if kind == "checkpoint":
            steps += draw(st.integers(0, 5))
            stall = draw(st.sampled_from([{}, {"stall": 1.0}]))
            facts = {"phases": {"write": draw(times), **stall}, "reason": draw(st.sampled_from(["steps", "end"]))}
            parent, head = head, f"c{len(rows)}"
            rows.append(checkpoint(at_s, steps, attempt, parent, checkpoint_id=head, head_after=head, **facts))
        else:
            attempt += 1
            rows.append(claim(at_s, attempt, "rewinds" if kind == "rewind" else None, head))
            outcome = draw(st.sampled_from(["", "resumed", "failed again", "gave up"]))
            lost_s = draw(st.none() | times)
            recoveries += [recovery(draw(times), attempt, draw(times), outcome, work_lost_s=lost_s)] if outcome else []
    spent(rows, recoveries)
