"""The soak campaign's choice and accounting of faults, without a campaign."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.soak_faults.account import journal
from benchmarks.soak_faults.choosing import KINDS, choose
from benchmarks.soak_faults.page import page_of
from benchmarks.soak_faults.strikes import STRIKES
from dlac_pipeline.extensions.chaos.facts import PHASES, last_before
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings


def test_every_kind_is_chosen() -> None:
    """As many faults as kinds have one of each kind, and each kind has a function that causes it."""
    assert STRIKES.keys() == KINDS.keys()
    chosen = choose(7, len(KINDS), runs=2)
    assert Counter(choice.kind for choice in chosen) == dict.fromkeys(KINDS, 1)
    assert "store full" not in {choice.kind for choice in choose(7, 200, runs=2, without=["store full"])}


def test_seed_determines_campaign() -> None:
    """Moments grow within the campaign's time. Another seed chooses other faults."""
    chosen = choose(1, 200, runs=2)
    assert chosen == choose(1, 200, runs=2) != choose(2, 200, runs=2)
    moments = [choice.moment for choice in chosen]
    assert moments == sorted(moments)
    assert moments[0] >= 0
    assert moments[-1] < 1
    assert {choice.run for choice in chosen} == {0, 1}


def test_follow_up_fault_strikes_same_run() -> None:
    """At most two faults strike together, as three consecutive attempts without a commit end a run."""
    chosen = choose(3, 300, runs=2)
    pairs = [(before, choice) for before, choice in itertools.pairwise(chosen) if choice.follows]
    assert pairs
    assert not chosen[0].follows
    for before, choice in pairs:
        assert not before.follows
        assert KINDS[before.kind].new_attempt
        assert before.run == choice.run


def test_notice_belongs_to_last_fault() -> None:
    """A notice before the first fault belongs to none, and a notice at the moment of a fault belongs to that fault."""
    struck = [(10.0, 3), (20.0, 5)]
    assert [last_before(struck, moment) for moment in (9.9, 10.0, 19.0, 25.0)] == [None, 3, 3, 5]


def test_journal_counts_attempt_of_checkpoint() -> None:
    """Steps that were repeated after an attempt's last checkpoint do not count, but its steps in a memory state do."""
    lineage = [CheckpointRow(attempt=1, step=2), CheckpointRow(attempt=2, step=3), CheckpointRow(attempt=3, step=5)]
    claims = [ClaimRow(attempt=1), ClaimRow(attempt=2), ClaimRow(attempt=3, memory_of=2, memory_step=4)]
    ranks = [
        (1, 1, 0, [4]),
        (1, 1, 1, [1]),
        (1, 2, 0, [2]),
        (1, 3, 0, [9]),
        (2, 3, 0, [3]),
        (2, 4, 0, [5]),
        (2, 5, 0, [8]),
    ]
    entries = [
        {"attempt": attempt, "step": step, "rank": rank, "ranks": 2, "rows": rows, "done": True, "at": at}
        for at, (attempt, step, rank, rows) in enumerate([*ranks, (3, 5, 0, [6])])
    ]
    assert journal(lineage, claims, entries) == {2: [1, 2, 4], 3: [3], 5: [5, 6]}


def test_journal_counts_last_committed_try() -> None:
    """Of the tries of replica groups the last one that any group committed counts, with the shares of all its groups."""
    tried = [(0, 3, [1]), (1, 3, [2]), (2, 3, [3]), (0, 2, [1, 2]), (1, 2, [3]), (0, 2, None), (0, 3, [9])]
    entries = [
        {"attempt": 1, "step": 1, "rank": rank, "ranks": ranks, "done": rows is None, "at": at}
        | ({} if rows is None else {"rows": rows})
        for at, (rank, ranks, rows) in enumerate(tried)
    ]
    assert journal([CheckpointRow(attempt=1, step=1)], [ClaimRow(attempt=1)], entries) == {1: [1, 2, 3]}


def test_unhealed_fault_is_reported() -> None:
    """The page of a failed campaign differs from the page of a successful one."""
    facts = {"recoveries": 0, "noticed_by": [], "outcomes": [], "rows_replayed": 0, "quarantined": 0}
    fault = {
        "number": 1,
        "kind": "rank killed",
        "during": None,
        "runs": ["soak-001"],
        "step": 17,
        "what": "SIGKILL to rank 1",
        "recovery_s": None,
        "summary": {**facts, **dict.fromkeys(PHASES, 0.0)},
    }
    run = {"attempts": 1, "finished": True, "audit_exact": False, "journal_agrees": True, "losses_identical": True}
    where = {"minutes_taken": 1.0, "seed": 1, "day": "2026-11-22", "machine": "2 cores", "skipped": ["store full"]}
    left = {"locks": ["soak-001"], "processes": []}
    page = page_of(
        {
            "faults": [fault],
            "runs": [run],
            "left": left,
            "launch_folders": {},
            "failed": "TrainingFailed: stuck",
            **where,
        }
    )
    for text in (
        "TrainingFailed: stuck",
        "Healed: 0 of 1",
        "**It failed:**",
        "Audit exact: 0 of 1",
        "locks: soak-001",
        "store full",
    ):
        assert text in page
