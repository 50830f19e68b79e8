"""The live rows of an Iceberg table, as DuckDB finds them in the same Parquet files by explicit anti joins."""

from collections.abc import Iterable, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFileContent

from dlac_pipeline.lakehouse.iceberg.columns import FileColumns
from dlac_pipeline.lakehouse.iceberg.row_groups import RowGroup
from tests.integration.iceberg_writer import Written


def oracle(files: Sequence[Written]) -> dict[str, list[int]]:
    """Live positions by data file, as DuckDB finds them in the same Parquet files by anti joins."""
    live = {}
    with duckdb.connect() as connection:
        for data in files:
            if data.content != DataFileContent.DATA:
                continue
            sql = "SELECT file_row_number FROM read_parquet(?, file_row_number = true) AS d WHERE true"
            arguments = [data.path]
            for delete in _applying(files, data):
                condition, more = _condition(delete, data)
                sql += condition
                arguments += more
            live[data.path] = [row for (row,) in connection.execute(f"{sql} ORDER BY 1", arguments).fetchall()]
    return live


def _applying(files: Sequence[Written], data: Written) -> list[Written]:
    """The delete files that apply, by the specification's words on scan planning."""
    vectors = [one for one in files if data.path in one.positions and one.sequence >= data.sequence]
    positional = [one for one in files if one.content == DataFileContent.POSITION_DELETES and not one.positions]
    positional = [one for one in positional if one.sequence >= data.sequence]
    equality = [one for one in files if one.content == DataFileContent.EQUALITY_DELETES]
    equality = [one for one in equality if one.sequence > data.sequence and one.partition in (None, data.partition)]
    return [*(vectors or positional), *equality]


def _condition(delete: Written, data: Written) -> tuple[str, list[Any]]:
    if delete.positions:
        return " AND NOT list_contains(?, file_row_number)", [[int(one) for one in delete.positions[data.path]]]
    if delete.content == DataFileContent.POSITION_DELETES:
        inner = "SELECT 1 FROM read_parquet(?) AS x WHERE x.file_path = ? AND x.pos = d.file_row_number"
        return f" AND NOT EXISTS ({inner})", [delete.path, data.path]
    same = " AND ".join(f'x."{name}" IS NOT DISTINCT FROM d."{name}"' for name in delete.columns)
    return f" AND NOT EXISTS (SELECT 1 FROM read_parquet(?) AS x WHERE {same})", [delete.path]


def live_positions(groups: Iterable[RowGroup]) -> dict[str, list[int]]:
    """Live positions by data file, as row groups say it."""
    live: dict[str, list[int]] = {}
    for group in groups:
        alive = np.setdiff1d(np.arange(group.rows), group.dead) + group.first_row
        live.setdefault(group.file_path, []).extend(alive.tolist())
    return live


def count_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of rows of each row group whose columns are aligned from now on."""
    aligned: list[int] = []
    real = FileColumns.align

    def counted(columns: FileColumns, read: pa.Table, count: int) -> pa.Table:
        aligned.append(count)
        return real(columns, read, count)

    monkeypatch.setattr(FileColumns, "align", counted)
    return aligned
