"""Every way to decide a filter beside a row-by-row oracle."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.iceberg.row_groups import row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from tests.integration.filter_cases import make_case, make_filter
from tests.integration.iceberg_oracle import live_positions

SEEDS = st.integers(0, 2**32)


def selected(table: Table, row_filter: str, exclude: tuple[str, ...] = ()) -> set[tuple[str, int]]:
    """(file, position) of the live rows."""
    live = live_positions(row_groups_of(table, snapshot_of(table, None).snapshot_id, row_filter, exclude=exclude))
    return {(path, position) for path, positions in live.items() for position in positions}


def check_table(seed: int, root: Path, filters: int) -> None:
    """Compare what random filters select of a random table: with statistics, as exclusions, and after compaction."""
    random = Random(seed)
    case = make_case(random, root)
    table, merged = case.hand.table, case.merged.table
    for _ in range(filters):
        text, decide = make_filter(random, case)
        decided = [decide(row) is True for row in case.rows]
        wanted = {place for place, true in zip(case.places, decided, strict=True) if true}
        assert selected(table, text) == wanted, text
        assert selected(table, "", (text,)) == set(case.places) - wanted, f"exclude {text}"
        found = {position for _, position in selected(merged, text)}
        assert found == {position for position, true in enumerate(decided) if true}, f"merged {text}"


@settings(max_examples=8)
@given(seed=SEEDS)
def test_filters_select_oracle_rows(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Partitions, metrics, statistics and rows agree with the oracle on 80 filters of 8 tables."""
    check_table(seed, tmp_path_factory.mktemp("t"), 10)


@pytest.mark.soak
@settings(max_examples=400)
@given(seed=SEEDS)
def test_many_filters_select_oracle_rows(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """The same for 20,000 filters on 400 tables."""
    check_table(seed, tmp_path_factory.mktemp("t"), 50)
