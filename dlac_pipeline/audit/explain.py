"""The audit's arithmetic as one SQL script for a plain DuckDB: no DLAC code, no Iceberg extension, only Parquet files.

The script names the data files of the tables' current snapshots. So it answers as of the moment at which it was written,
while those files are kept.
"""

from typing import Any

import duckdb
from pyiceberg.io.pyarrow import schema_to_pyarrow

from dlac_pipeline.audit.audit import open_run
from dlac_pipeline.audit.lakehouse_sql import QUESTIONS, rows_of, sql_script
from dlac_pipeline.lakehouse.errors import UnsupportedDeletes
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name
from dlac_pipeline.lakehouse.ledger.schemas import TABLES

_HEAD = """\
-- The rows that a checkpoint of run {run} has consumed. Run this script in DuckDB without changes: duckdb < this.sql

-- 1. The tables, as the Parquet files of their current snapshots. (For files on S3: INSTALL httpfs; LOAD httpfs;)
"""
_QUESTIONS = """\
-- 2. Views and macros. The ledger records the positions of each block that a checkpoint moved over. The position of a row
--    is computed from its place in its data file, with integer arithmetic.

"""
_EXAMPLE = """\
-- 3. An example: row {row} of a data file, and a head of run {run}.
-- 3a. The position of the row in each pass over its file: from its work unit, slice and block, by the inverse permutation.
FROM row_positions({file}, {row});

-- 3b. The checkpoint and its ancestors, through forks also in other runs. The model has seen the rows that these consumed.
FROM ancestors({checkpoint}) ORDER BY run, seq;

-- 3c. The advances of these checkpoints that cover the position.
SELECT a.checkpoint_id, a.pass, a.key_group, a.block, a.position_start, r.position, a.position_end, a.applied
FROM row_positions({file}, {row}) AS r JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
WHERE a.kind = 'advance' AND r.position >= a.position_start AND r.position < a.position_end
    AND a.checkpoint_id IN (SELECT checkpoint_id FROM ancestors({checkpoint}));

-- 3d. The same in one call: true if the checkpoint has consumed the row.
SELECT consumed({file}, {row}, {checkpoint}) AS consumed;
"""
_NO_EXAMPLE = "-- 3. Run {run} has no checkpoint yet. Later: SELECT consumed('<data file>', <row>, '<checkpoint>');\n"
_LAST_ADVANCE = """\
CREATE OR REPLACE TEMP VIEW last_advance AS
SELECT a.* FROM advances AS a JOIN lineage AS l USING (run, checkpoint_id)
WHERE l.is_head AND a.rows_consumed > 0
ORDER BY a.source, a.key_group, a.pass DESC, a.block DESC, a.position_end DESC
LIMIT 1
"""
_LAST_POSITION = (
    "CREATE OR REPLACE TEMP VIEW last_position AS FROM consumed_at('last_advance') ORDER BY position DESC LIMIT 1"
)
_LAST_ROW = "SELECT file_path, row, checkpoint_id FROM rows_at('last_position')"
"""The last row that the head consumed of its first key group."""


def explain_sql(lakehouse: Lakehouse, run: str, checkpoint: str | None = None) -> str:
    """A self-contained DuckDB script that answers whether a row was consumed by a checkpoint, with an example from `run`.

    The example is that of its head, or of `checkpoint`, an id or a step.

    Raises:
        NoSuchRun: the ledger has no row of it.
        NoSuchCheckpoint: it has no such checkpoint.
        SpecInvalid: a run cannot have this name, which the script has in its comments.
        UnsupportedDeletes: one of DLAC's tables carries delete files.
    """
    check_run_name(run)
    with open_run(lakehouse, run, checkpoint) as connection:
        connection.execute(_LAST_ADVANCE)
        connection.execute(_LAST_POSITION)
        found = rows_of(connection, _LAST_ROW)
    # Listed after the example is chosen, so that they contain it. The ledger is first, because the rows that it names are older.
    tables = [_table_view(lakehouse, name) for name in ("consumption", "slices", "plans", "work_units")]
    if found:
        [row] = found
        file, checkpoint = _quoted(row["file_path"]), _quoted(row["checkpoint_id"])
        example = _EXAMPLE.format(run=run, file=file, row=row["row"], checkpoint=checkpoint)
    else:
        example = _NO_EXAMPLE.format(run=run)
    questions = [sql_script(name) for name in QUESTIONS]
    return "\n".join([_HEAD.format(run=run), *tables, _QUESTIONS + "\n".join(questions), example])


def _table_view(lakehouse: Lakehouse, name: str) -> str:
    tasks = lakehouse.look(name, lambda table: list(table.scan().plan_files()))
    if any(task.delete_files for task in tasks):
        raise UnsupportedDeletes(f"expected table {name!r} without delete files, found some: compact it, then retry")
    if not tasks:
        return f"CREATE OR REPLACE VIEW {name} AS {_no_rows(name)};\n"
    here = lakehouse.relocation.here
    paths = sorted(here(raw_path(task.file.file_path) or task.file.file_path) for task in tasks)
    listed = ",\n    ".join(_quoted(path) for path in paths)
    return (
        f"CREATE OR REPLACE VIEW {name} AS FROM read_parquet([\n    {listed}\n"
        "], union_by_name = true, hive_partitioning = false);\n"
    )


def _no_rows(name: str) -> str:
    """A query with the columns of one of DLAC's tables and no row."""
    schema, _ = TABLES[name]
    empty: Any = schema_to_pyarrow(schema, include_field_ids=False).empty_table()
    with duckdb.connect() as connection:
        connection.register("empty", empty)
        columns = rows_of(connection, "DESCRIBE empty")
    listed = ", ".join(f"NULL::{column['column_type']} AS {column['column_name']}" for column in columns)
    return f"SELECT {listed} WHERE false"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
