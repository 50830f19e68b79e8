"""The audit's arithmetic as one SQL script for a plain DuckDB: no DLAC code, and only Parquet files or Iceberg tables.

The script names the data files, or the metadata files, of the tables' current snapshots. So it answers as of the moment at
which it was written, while those files are kept.
"""

from collections.abc import Iterable, Mapping

from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from dlac_pipeline.audit.audit import open_run
from dlac_pipeline.audit.lakehouse_sql import (
    AUDIT_TABLES,
    QUESTIONS,
    names_in,
    rows_of,
    script_of_view,
    scripts_of,
    sql_script,
)
from dlac_pipeline.lakehouse.errors import UnsupportedDeletes
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.own_rows import data_files, no_rows, sql_literals
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
_AUDIT = """\
-- 4. The audit: the rows of run {run} in a schema of their own, and the views that judge them. It asks DLAC's tables only:
--    `dlac audit` also compares the footers of the data files with the plans.
DROP SCHEMA IF EXISTS dlac_audit CASCADE;
CREATE SCHEMA dlac_audit;
CREATE TABLE dlac_audit.consumption AS FROM consumption WHERE run = '{run}' AND seq <= {until_seq};
CREATE TABLE dlac_audit.recoveries AS FROM recoveries WHERE run = '{run}' AND seq <= {until_seq};
{tables}
USE dlac_audit;

{views}
FROM passes;
FROM duplicates;
FROM gaps;
CREATE TABLE found_problems AS SELECT problem FROM problems;
CREATE TABLE audited_totals AS FROM totals;
USE main;

-- 4a. Every problem, in a sentence. A sound run has none.
FROM dlac_audit.found_problems;

-- 4b. The totals, and the verdict.
FROM dlac_audit.audited_totals;
SELECT rows_duplicated = 0 AND rows_missing = 0 AND NOT EXISTS (FROM dlac_audit.found_problems) AS exact
FROM dlac_audit.audited_totals;
"""
_AUDITED = ("totals", "passes", "duplicates", "gaps", "problems")
_NO_EXAMPLE = "-- 3. Run {run} has no checkpoint yet. Later: SELECT consumed('<data file>', <row>, '<checkpoint>');\n"


def explain_sql(lakehouse: Lakehouse, run: str, checkpoint: str | None = None, *, iceberg: bool = False) -> str:
    """A self-contained DuckDB script that answers whether a row was consumed by a checkpoint, and audits `run`.

    Its example is of the head, or of `checkpoint`, an id or a step. It ends with the totals and the verdict of the audit at that
    checkpoint. `iceberg`: the script reads the tables by DuckDB's extension of this name. Raises as `open_run`, and `SpecInvalid`
    for a name that no run can have (it is in comments), or `UnsupportedDeletes` if one of DLAC's tables carries delete files.
    """
    check_run_name(run)
    last_advance, last_row = sql_script("last_advance"), sql_script("last_row")
    with open_run(lakehouse, run, checkpoint, query=last_advance + last_row) as connection:
        found = [row for advance in rows_of(connection, last_advance) for row in rows_of(connection, last_row, advance)]
        [(until_seq,)] = connection.execute("SELECT max(seq) FROM consumption").fetchall()
    # Listed after the example is chosen, so that they contain it.
    tables, questions = tables_and_views(lakehouse, QUESTIONS, iceberg=iceberg)
    tables.append(_table_view(lakehouse, "recoveries", None, iceberg=iceberg))
    if found:
        [row] = found
        file, checkpoint = sql_literals([row["file_path"]]), sql_literals([row["checkpoint_id"]])
        example = sql_script("explained_row").format(run=run, file=file, row=row["row"], checkpoint=checkpoint)
    else:
        example = _NO_EXAMPLE.format(run=run)
    head = _HEAD.format(run=run) + ("INSTALL iceberg; LOAD iceberg;\n" if iceberg else "")
    return "\n".join([head, *tables, _QUESTIONS + "\n".join(questions), example, _audit_sql(run, until_seq)])


def _audit_sql(run: str, until_seq: int) -> str:
    """Return SQL that audits a run as it was with that `seq`, over the tables that were defined before."""
    others = ("slices", "plans", "work_units")
    tables = "\n".join(f"CREATE VIEW dlac_audit.{each} AS FROM main.{each};" for each in others)
    views = "\n".join(script_of_view(each, AUDIT_TABLES) for each in scripts_of(names_in(" ".join(_AUDITED))))
    return _AUDIT.format(run=run, until_seq=until_seq, tables=tables, views=views)


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


def _table_view(lakehouse: Lakehouse, name: str, snapshot_id: int | None, *, iceberg: bool) -> str:
    def look(table: Table) -> tuple[list[DataFile] | None, str]:
        return data_files(table, AlwaysTrue(), snapshot_id), table.metadata_location

    files, metadata = lakehouse.look(name, look)
    if files is None:
        raise UnsupportedDeletes(f"expected table {name!r} without delete files, found some: compact it, then retry")
    if not files:
        return f"CREATE OR REPLACE VIEW {name} AS {no_rows(name)};\n"
    here = lakehouse.relocation.here
    if iceberg:
        location = sql_literals([here(raw_path(metadata) or metadata)])
        return f"CREATE OR REPLACE VIEW {name} AS FROM iceberg_scan({location});\n"
    paths = sorted(here(raw_path(each.file_path) or each.file_path) for each in files)
    listed = ",\n    ".join(sql_literals([path]) for path in paths)
    # a file lacks the columns of which it has no value
    return (
        f"CREATE OR REPLACE VIEW {name} AS {no_rows(name)} UNION ALL BY NAME FROM read_parquet([\n    {listed}\n"
        "], union_by_name = true, hive_partitioning = false);\n"
    )
