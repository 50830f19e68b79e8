"""Check of the data files that a run has read: they exist and are the planned ones. Footers against work units."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from dlac_pipeline.audit.lakehouse_sql import rows_of
from dlac_pipeline.lakehouse.errors import NoSuchTable
from dlac_pipeline.lakehouse.external.mirror import retained_snapshots
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

_THREADS = 8
_NAMED = 10
"""Data files that are named one by one. Further ones are counted."""


def file_problems(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse, run: str) -> list[str]:
    """Return the problems of the data files of the blocks that the run's surviving lineage has entered, as sentences.

    Files of released snapshots that their table has expired since may be gone.
    """
    units = rows_of(
        connection,
        "SELECT DISTINCT u.file_path, u.row_group, u.first_row, u.rows, u.plan_id "
        "FROM advances AS a JOIN slices AS s USING (cut_id, key_group, block) "
        "JOIN units AS u ON u.plan_id = s.plan_id AND u.unit = s.unit "
        "WHERE a.run = ? ORDER BY u.file_path, u.row_group",
        [run],
    )
    by_file: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        by_file.setdefault(unit["file_path"], []).append(unit)
    tables, expired = _source_files(connection, lakehouse)
    own = lakehouse.own("consumption").io

    def answer(path: str) -> str | None:
        return _problem(tables.get(by_file[path][0]["plan_id"], own), path, by_file[path], expired)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
        answers = pool.map(answer, by_file)
        problems = [problem for problem in answers if problem is not None]
    if len(problems) > _NAMED:
        return [*problems[:_NAMED], f"{len(problems) - _NAMED} more data files are missing or differ from their plan"]
    return problems


def _source_files(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse) -> tuple[dict[str, FileIO], set[str]]:
    """Return plan -> access to the files of its table, in that table's catalog, and the plans of expired snapshots.

    A table counts by its uuid, under any name.
    """
    plans = rows_of(connection, "SELECT plan_id, source_table, table_uuid, snapshot_id FROM plans", [])
    tables: dict[str, Table] = {}
    for name in {plan["source_table"] for plan in plans}:
        with suppress(NoSuchTable):
            table = lakehouse.load(name)
            tables[str(table.metadata.table_uuid)] = table
    retained = {uuid: retained_snapshots(table) for uuid, table in tables.items()}
    known = [plan for plan in plans if plan["table_uuid"] in tables]
    expired = {plan["plan_id"] for plan in known if plan["snapshot_id"] not in retained[plan["table_uuid"]]}
    return {plan["plan_id"]: tables[plan["table_uuid"]].io for plan in known}, expired


def _problem(io: FileIO, path: str, units: list[dict[str, Any]], expired: set[str]) -> str | None:
    try:
        with io.new_input(path).open() as stream:
            footer = pq.ParquetFile(stream).metadata
    except (OSError, pa.ArrowInvalid) as err:
        if isinstance(err, FileNotFoundError) and expired.issuperset(unit["plan_id"] for unit in units):
            return None
        groups = len({unit["row_group"] for unit in units})
        return f"expected the data file {path!r} with {groups} planned row groups, found {type(err).__name__}: {err}"
    found = dict(_row_groups(footer))
    for unit in units:
        planned = (unit["first_row"], unit["rows"])
        if found.get(unit["row_group"]) != planned:
            return (
                f"expected (first row, rows) {planned} in row group {unit['row_group']} of data file {path!r}, "
                f"found {found.get(unit['row_group'])!r}"
            )
    return None


def _row_groups(footer: pq.FileMetaData) -> Iterator[tuple[int, tuple[int, int]]]:
    """Row group -> (position in the file of its first row, rows)."""
    first_row = 0
    for index in range(footer.num_row_groups):
        rows = footer.row_group(index).num_rows
        yield index, (first_row, rows)
        first_row += rows
