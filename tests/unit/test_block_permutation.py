from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.block_permutation import MAX_BLOCK_ROWS, choose_permutation
from dlac_pipeline.plan.keys import derive_key, draw_sort_keys, mix

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), KEYS, st.booleans())
def test_the_map_is_a_bijection_with_that_inverse(rows: int, key: int, shuffle: bool) -> None:
    """Positions reach every row of the block once, and the inverse leads back."""
    permutation = choose_permutation(rows, key, shuffle=shuffle)
    at = permutation.rows_at(np.arange(rows))
    assert sorted(at) == list(range(rows))
    assert (permutation.positions_of(at) == np.arange(rows)).all()


@settings(max_examples=50, deadline=None)
@given(KEYS)
def test_the_largest_block_does_not_overflow(key: int) -> None:
    """At the greatest allowed number of rows, map and inverse still agree."""
    rows = MAX_BLOCK_ROWS - 1
    permutation = choose_permutation(rows, key, shuffle=True)
    at = permutation.rows_at(np.arange(rows - 100, rows))
    assert ((at >= 0) & (at < rows)).all()
    assert (permutation.positions_of(at) == np.arange(rows - 100, rows)).all()


def test_without_shuffle_the_map_is_the_identity() -> None:
    """Unshuffled blocks are read in the table's own order."""
    assert choose_permutation(10, 12345, shuffle=False).rows_at(np.arange(10)).tolist() == list(range(10))


@pytest.mark.parametrize("rows", [0, -1, MAX_BLOCK_ROWS])
def test_a_block_that_cannot_be_mapped_is_refused(rows: int) -> None:
    """A block of no rows, or of so many that the arithmetic would overflow, is an error that names the number."""
    with pytest.raises(ValueError, match=str(rows)):
        choose_permutation(rows, 0, shuffle=True)


def test_splitmix64_is_the_published_one() -> None:
    """The generator gives the published first outputs for state 0, so that any engine can repeat the order."""
    gamma = 0x9E3779B97F4A7C15
    assert [mix(0), mix(gamma), mix(2 * gamma)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), KEYS)
def test_sort_keys_differ(size: int, key: int) -> None:
    """Each index appears once."""
    assert len(set(draw_sort_keys(size, key).tolist())) == size


def test_keys_depend_on_the_order_of_labels() -> None:
    """Swapped labels give another key."""
    assert derive_key(1, 2) != derive_key(2, 1)
