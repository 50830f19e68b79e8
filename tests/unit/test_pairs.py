"""The list of combinations in benchmarks/pairs.py."""

from __future__ import annotations

from itertools import combinations, product

from benchmarks.pairs_lab.factors import FACTORS, draw, is_valid, pairs_of, quick_list, reduce, valid_pairs


def test_all_valid_pairs_are_covered() -> None:
    """Each pair of values that a valid combination can have is in one of the first hundred."""
    chosen = draw(3, 100)
    assert all(map(is_valid, [*chosen, *quick_list()]))
    assert set().union(*map(pairs_of, chosen)) == valid_pairs()


def test_valid_pairs_are_those_of_all_combinations() -> None:
    """Pairs that no valid combination has are left out, and no others."""
    named = ("engine", "ranks", "origin", "then", "extras")  # the other factors at values that exclude nothing
    rest = {"memory": "on", "source": "counted", "fault": "SIGTERM"}
    chosen = [dict(zip(named, values, strict=True)) for values in product(*(FACTORS[name] for name in named))]
    found = {pair for each in chosen if is_valid({**rest, **each}) for pair in combinations(sorted(each.items()), 2)}
    known = {tuple(sorted(pair)) for pair in valid_pairs() if {pair[0][0], pair[1][0]} <= set(named)}
    assert known == found
    assert (("engine", "zero1"), ("ranks", "replicas")) not in known


def test_seed_repeats_the_list() -> None:
    """The same seed draws the same combinations, and another one others."""
    assert draw(5, 80) == draw(5, 80)
    assert draw(5, 80) != draw(6, 80)


def test_reduction_keeps_the_guilty_pair() -> None:
    """All values become the simplest ones, except the values that the failure needs."""
    left = reduce(quick_list()[1], lambda each: (each["engine"], each["memory"]) == ("dcp", "on"))
    assert {name for name in FACTORS if left[name] != FACTORS[name][0]} == {"engine", "memory"}
