"""The choices and sums of benchmarks, without a measurement."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.pairs_lab.factors import draw, is_valid, pairs_of, quick_list, valid_pairs
from benchmarks.paper_parts.divergence import BATCH, Outcome
from benchmarks.paper_parts.summary import summarize
from benchmarks.soak_faults.choosing import KINDS, choose
from benchmarks.soak_faults.strikes import STRIKES

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings


def test_all_valid_pairs_are_covered() -> None:
    """Each pair of values that a valid combination can have is in one of the first hundred."""
    chosen = draw(3, 100)
    assert all(map(is_valid, [*chosen, *quick_list()]))
    assert set().union(*map(pairs_of, chosen)) == valid_pairs()


def test_every_kind_is_chosen() -> None:
    """As many faults as kinds have one of each kind, and each kind has a function that causes it."""
    assert STRIKES.keys() == KINDS.keys()
    chosen = choose(7, len(KINDS), runs=2)
    assert Counter(choice.kind for choice in chosen) == dict.fromkeys(KINDS, 1)
    assert "store full" not in {choice.kind for choice in choose(7, 200, runs=2, without=["store full"])}


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


CALM = {10: 4.0, 20: 3.0, 30: 2.0}


def outcome(method: str, *, seed: int = 0, faulted: bool, validation: dict[int, float] = CALM) -> Outcome:
    """Return a training of 30 steps whose training losses equal its validation losses."""
    return Outcome(
        setting="stream", method=method, seed=seed, faulted=faulted, failed="", trained=30, computed=30, losses=dict(validation),
        validation=validation,
    )  # fmt: skip


def test_method_is_compared_with_own_calm_training() -> None:
    """A method that shares its undisturbed training has the values of that training. A failed one is named, and not averaged."""
    worse = {step: loss + 0.5 for step, loss in CALM.items()}
    outcomes = [
        outcome("dlac", faulted=False),
        outcome("dlac", faulted=True),
        outcome("stateful", faulted=False),
        replace(outcome("restart", faulted=True, validation=worse), repeated=8, missing=6, computed=45),
        replace(outcome("restart", seed=1, faulted=True), failed="out of rows", validation={}),
    ]
    ours, hf, restart = summarize([*outcomes, replace(outcome("hf", faulted=True), failed="no such rank")], BATCH)
    assert (hf.method, hf.seeds, hf.failed) == ("hf", 0, ("no such rank",))
    assert (ours.method, ours.identical, ours.excess, ours.area) == ("dlac", 1, 0.0, 0.0)
    assert (restart.method, restart.identical, restart.seeds, restart.failed) == ("restart", 0, 1, ("out of rows",))
    assert (restart.excess, restart.area) == (0.5, 0.5)
    assert ours.loss_distance == 0
    assert restart.loss_distance == pytest.approx((0.5 / 4 + 0.5 / 3 + 0.5 / 2) / 3)
    assert (ours.reached, restart.reached) == (1, 0)
    assert (restart.worth, restart.computed, restart.repeated, restart.missing) == (25, 1.5, 8, 6)
