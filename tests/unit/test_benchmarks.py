"""The choices and sums of benchmarks, without a measurement."""

from collections import Counter

import pytest

from benchmarks.pairs_lab.factors import draw, is_valid, pairs_of, quick_list, valid_pairs
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
    assert Counter(choice.kind for choice in choose(7, len(KINDS), runs=2)) == dict.fromkeys(KINDS, 1)
    assert "store full" not in {choice.kind for choice in choose(7, 200, runs=2, without=["store full"])}
