"""The survival protocol, simulated: all seeds pass, and each rule is needed. See docs/design/0030-memory-states.md."""

import os
from collections.abc import Callable

import pytest

from tests.simulation.campaign import first_caught, run_chunk, run_seeds
from tests.simulation.rules import NAMES, Rules, without
from tests.simulation.world import ENGINES, ONE_NODE

_QUICK = 1_000
_SEARCHED = 10_000
_WEAKER: dict[str, Callable[..., bool]] = {
    "continues_head": lambda stamp, base, head, nonce, quorum: head == base or nonce == stamp.nonce,
    "may_evict": lambda held, floor: floor[1] > 0 and held.step < floor[1],
    "is_healed": lambda position, newest: position[1] == newest[1],
    "succeeds_quorum": lambda later, joined: not later or later[-1] in joined,
    "is_beyond_head": lambda step, head_step: step >= head_step,
    "stays_member": lambda node, later: not later or node in later[-1],
}
"""Rules without one of their conditions: quorums, attempts, quorums, equality, and the quorums before the last one."""


_OF_ONE_NODE = (
    *("owns_run", "have_all_voted", "extends_head", "follows_parent", "have_all_contributed", "have_ranks_voted"),
    *("has_newest", "is_same_execution", "is_beyond_head"),
)
"""Rules of the replica groups that are built."""


def test_invariants_hold() -> None:
    """All engines, all kinds of faults, and all phases in which they strike."""
    total = run_chunk((), range(_QUICK))
    assert total.failed[:1] == []
    assert total.from_memory > 0


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=pytest.mark.slow) if rule in ("is_restorable", "continues_head") else rule
        for rule in NAMES
    ],
)
def test_missing_rule_is_caught(rule: str) -> None:
    """Some schedule violates an invariant as soon as the rule permits everything."""
    assert first_caught(without(rule), range(_SEARCHED)) is not None


@pytest.mark.parametrize("rule", _OF_ONE_NODE)
def test_groups_of_one_node_need_rule(rule: str) -> None:
    """Other engines share some of the rules. These schedules are of the engine that is built."""
    seeds = range(ENGINES.index(ONE_NODE), _SEARCHED, len(ENGINES))
    assert first_caught(without(rule), seeds) is not None


def test_failing_seed_repeats() -> None:
    """A seed is one schedule: its events are the same each time, and a person can read them."""
    first, second = (str(first_caught(without("is_donor"), range(_SEARCHED))) for _ in range(2))
    assert first == second
    assert "fault:" in first
    assert "violation:" in first


@pytest.mark.soak
@pytest.mark.parametrize("rule", _WEAKER)
def test_weaker_rule_is_caught(rule: str) -> None:
    """Each condition of a rule is needed."""
    weaker = type("Weaker", (Rules,), {rule: staticmethod(_WEAKER[rule])})
    assert first_caught(weaker, range(5 * _SEARCHED)) is not None


@pytest.mark.soak
def test_invariants_hold_for_long() -> None:
    """Hundred thousand schedules."""
    assert run_seeds(100_000, os.cpu_count() or 1).failed[:1] == []
