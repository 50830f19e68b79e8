from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.table import Table

from dlac_pipeline.extensions.history.row_keys import identity_keys
from dlac_pipeline.extensions.history.row_matching import Mask, Rows, match
from dlac_pipeline.extensions.history.steps import TableRows
from dlac_pipeline.lakehouse.errors import DataFileUnreadable
from tests.empty_lakehouse import empty_lakehouse

COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "whole": (pa.int32(), lambda n: n - 2),
    "text": (pa.string(), lambda n: f"docs/{n}'\"\\ ü"),
    "flag": (pa.bool_(), lambda n: bool(n % 2)),
    "day": (pa.date32(), lambda n: date(1969, 12, 30) + timedelta(days=n)),
    "at": (pa.timestamp("us"), lambda n: datetime(2026, 1, 1) + timedelta(microseconds=n)),
    "instant": (pa.timestamp("us", "UTC"), lambda n: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=n)),
    "clock": (pa.time64("us"), lambda n: time(1, 2, n)),
    "number": (pa.float64(), lambda n: [0.1, -0.0, 0.0, float("nan"), 1e300][n]),
    "money": (pa.decimal128(20, 3), lambda n: Decimal(n) / 8),
    "bytes": (pa.binary(), lambda n: bytes([0, n, 255])),
    "fixed": (pa.binary(4), lambda n: bytes([n, 0, 0, 39])),
}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Return two snapshots with rows 0 to 4 of every type and a list. The second has another order."""
    lakehouse = empty_lakehouse(tmp_path / "home")
    fields = [(name, kind) for name, (kind, _) in COLUMNS.items()]
    schema = pa.schema([*fields, ("tags", pa.list_(pa.int64()))])
    made = lakehouse.catalog.create_table("src.t", schema)
    for numbers in (range(5), (3, 1, 4)):
        rows = [{**{name: value(n) for name, (_, value) in COLUMNS.items()}, "tags": [n]} for n in numbers]
        made.append(pa.Table.from_pylist(rows, schema=schema))
    return made


def sides(table: Table) -> tuple[list[Rows], list[Rows]]:
    """Return the rows of the first and of the second data file."""
    first, second = (snapshot.snapshot_id for snapshot in table.snapshots())
    rows = TableRows(table)
    [old] = rows.files(first)
    [new] = [path for path in rows.files(second) if path != old]
    return [rows.rows((first, old))], [rows.rows((second, new))]


def listed(masks: list[Mask]) -> list[list[int]]:
    """The positions in each mask."""
    return [np.flatnonzero(mask).tolist() for mask in masks]


def test_rows_are_matched_by_columns_of_any_type(table: Table) -> None:
    """Rows with equal values are one row, whatever the type: null, NaN and minus zero are values like others."""
    for columns in [[name] for name in COLUMNS if name != "flag"] + [list(COLUMNS), ["flag", "text"]]:
        old, new = match(table, *sides(table), identity_keys(table.schema(), columns))
        assert (listed(old), listed(new)) == ([[1, 3, 4]], [[0, 1, 2]]), columns


def test_only_chosen_rows_are_matched(table: Table) -> None:
    """Rows that are not meant are no partner, and nothing is read where no row is meant."""
    old, new = sides(table)
    old[0].chosen[[1, 3]] = False
    keys = identity_keys(table.schema(), ["text"])
    assert [listed(masks) for masks in match(table, old, new, keys)] == [[[4]], [[2]]]
    old[0].chosen[:] = False
    assert [listed(masks) for masks in match(table, old, new, keys)] == [[[]], [[]]]
    assert [listed(masks) for masks in match(table, [], new, keys)] == [[], [[]]]


def test_a_missing_file_is_named(table: Table) -> None:
    """What goes wrong while DuckDB asks for rows comes out as our own error."""
    old, new = sides(table)
    Path(old[0].file.path.removeprefix("file://")).unlink()
    with pytest.raises(DataFileUnreadable, match=r"expected to read \['whole'\] of .*restore the file"):
        match(table, old, new, identity_keys(table.schema(), ["whole"]))


def test_a_join_larger_than_its_memory(table: Table) -> None:
    """With little memory the join spills to disk and finds the same."""
    big = 300_000
    order = np.random.default_rng(0).permutation(big)
    schema = pa.schema([("text", pa.string())])
    made = table.catalog.create_table("src.big", schema)
    for numbers in (np.arange(big), order[: big // 2]):
        made.append(pa.table({"text": [f"https://example.org/{n}" for n in numbers]}, schema=schema))
    keys = identity_keys(made.schema(), ["text"])
    old, new = match(made, *sides(made), keys, memory_bytes=48 << 20)
    assert np.array_equal(np.flatnonzero(old[0]), np.sort(order[: big // 2]))
    assert new[0].all()
