"""The audit's arithmetic as one SQL script for a plain DuckDB: no DLAC code, and only Parquet files or Iceberg tables.

The script names the data files, or the metadata files, of the tables' current snapshots. So it answers as of the moment at
which it was written, while those files are kept.
"""

from collections.abc import Iterable, Mapping

from pyiceberg.table import FileScanTask, Table

from dlac_pipeline.audit.audit import open_run
from dlac_pipeline.audit.lakehouse_sql import QUESTIONS, rows_of, sql_script
from dlac_pipeline.lakehouse.errors import UnsupportedDeletes
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.own_rows import no_rows, sql_literals
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name

EXPLAINED = ("consumption", "slices", "plans", "work_units", "row_keys")
"""Tables in a script. The ledger is first, because the rows that it names are older."""
_HEAD = """\
-- The rows that a checkpoint of run {run} has consumed. Run this script in DuckDB without changes: duckdb < this.sql

-- 1. The tables as of this moment: their Parquet files, or their metadata files. (On S3: INSTALL httpfs; LOAD httpfs;)
"""
_QUESTIONS = """\
-- 2. Views and macros. The ledger records the positions of each block that a checkpoint moved over. The position of a row
--    is computed from its place in its data file, with integer arithmetic.

"""
_NO_EXAMPLE = "-- 3. Run {run} has no checkpoint yet. Later: SELECT consumed('<data file>', <row>, '<checkpoint>');\n"


def explain_sql(lakehouse: Lakehouse, run: str, checkpoint: str | None = None, *, iceberg: bool = False) -> str:
    """A self-contained DuckDB script that answers whether a row was consumed by a checkpoint, with an example from `run`.

    The example is that of its head, or of `checkpoint`, an id or a step. `iceberg`: the script reads the tables by DuckDB's
    extension of this name. Raises as `open_run`, and `SpecInvalid` for a name that no run can have (it is in comments), or
    `UnsupportedDeletes` if one of DLAC's tables carries delete files.
    """
    check_run_name(run)
    last_advance, last_row = sql_script("last_advance"), sql_script("last_row")
    with open_run(lakehouse, run, checkpoint, query=last_advance + last_row) as connection:
        found = [row for advance in rows_of(connection, last_advance) for row in rows_of(connection, last_row, advance)]
    # Listed after the example is chosen, so that they contain it.
    tables, questions = tables_and_views(lakehouse, QUESTIONS, iceberg=iceberg)
    if found:
        [row] = found
        file, checkpoint = sql_literals([row["file_path"]]), sql_literals([row["checkpoint_id"]])
        example = sql_script("explained_row").format(run=run, file=file, row=row["row"], checkpoint=checkpoint)
    else:
        example = _NO_EXAMPLE.format(run=run)
    head = _HEAD.format(run=run) + ("INSTALL iceberg; LOAD iceberg;\n" if iceberg else "")
    return "\n".join([head, *tables, _QUESTIONS + "\n".join(questions), example])


def tables_and_views(
    lakehouse: Lakehouse,
    names: Iterable[str],
    *,
    iceberg: bool = False,
    snapshots: Mapping[str, int | None] | None = None,
) -> tuple[list[str], list[str]]:
    """Return SQL that defines the tables by their files, and the scripts of these names. Raises `UnsupportedDeletes`.

    The files are those of `snapshots`, by table, where None has no rows. Unset: those of the current snapshots.
    """
    tables = []
    for name in EXPLAINED:
        at = None if snapshots is None else snapshots[name]
        is_empty = snapshots is not None and at is None
        view = f"CREATE OR REPLACE VIEW {name} AS {no_rows(name)};\n"
        tables.append(view if is_empty else _table_view(lakehouse, name, at, iceberg=iceberg))
    # The walk to the ancestors of a checkpoint reads the branches again and again.
    scripts = (sql_script(name) for name in names)
    return tables, [each.replace("VIEW branch_checkpoints", "TABLE branch_checkpoints") for each in scripts]


def _table_view(lakehouse: Lakehouse, name: str, snapshot: int | None, *, iceberg: bool) -> str:
    def look(table: Table) -> tuple[list[FileScanTask], str]:
        return list(table.scan(snapshot_id=snapshot).plan_files()), table.metadata_location

    tasks, metadata = lakehouse.look(name, look)
    if any(task.delete_files for task in tasks):
        raise UnsupportedDeletes(f"expected table {name!r} without delete files, found some: compact it, then retry")
    if not tasks:
        return f"CREATE OR REPLACE VIEW {name} AS {no_rows(name)};\n"
    here = lakehouse.relocation.here
    if iceberg:
        location = sql_literals([here(raw_path(metadata) or metadata)])
        return f"CREATE OR REPLACE VIEW {name} AS FROM iceberg_scan({location});\n"
    paths = sorted(here(raw_path(task.file.file_path) or task.file.file_path) for task in tasks)
    listed = ",\n    ".join(sql_literals([path]) for path in paths)
    return (
        f"CREATE OR REPLACE VIEW {name} AS FROM read_parquet([\n    {listed}\n"
        "], union_by_name = true, hive_partitioning = false);\n"
    )
