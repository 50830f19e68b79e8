"""Forgetting of rows: the checkpoints of all runs that have seen them, and the cost of training without them.

In: a table and filters. A row is forgotten if any filter is true for it.
Out: the state of the request, as `audit/sql/forget.sql` computes it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import duckdb
import pyarrow as pa
from blake3 import blake3

from dlac_pipeline.audit.lakehouse_sql import NO_PLACES, excluded_places, open_audit, rows_of, sql_script
from dlac_pipeline.extensions.erasure.keyed_rows import keyed_places
from dlac_pipeline.extensions.erasure.limits import certificate_limits
from dlac_pipeline.lakehouse.errors import DataFileUnreadable, DlacError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.own_rows import sql_literals
from dlac_pipeline.lakehouse.iceberg.row_groups import parse_exclusion
from dlac_pipeline.lakehouse.iceberg.sources import check_data_files
from dlac_pipeline.spec.job_spec import JobSpec

_HOW_TO_COUNT = "record keys with source.row_keys, and name the rows by values of their identity columns"
SpecOf = Callable[[str], JobSpec | None]
"""Run -> its job spec, or None if it is not on this node."""

ForgetPlan = dict[str, Any]
"""State of a request: `id`, `table`, `table_uuid`, `filters`, and of `forget.sql` its `rows`, `runs` and `problems`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment in the ledger: `seqs` are the last ones of some runs, and `at` is the time for all others."""

    at: datetime
    seqs: Mapping[str, int]

    def restore(self, connection: duckdb.DuckDBPyConnection) -> bool:
        """Remove later rows from the tables of a connection. Return False: none of them is merged."""
        views = {name for (name,) in connection.execute("SELECT view_name FROM duckdb_views()").fetchall()}
        kind, plans_kind = ("VIEW" if name in views else "TABLE" for name in ("consumption", "plans"))
        runs = [list(self.seqs), list(self.seqs.values())]
        connection.execute(
            "CREATE TABLE certified_runs AS SELECT unnest($1::VARCHAR[]) AS run, unnest($2::BIGINT[]) AS seq", runs
        )
        at = sql_literals([self.at.isoformat()])
        connection.execute(sql_script("ledger_until").format(kind=kind, plans_kind=plans_kind, at=at))
        return False


def plan_forget(
    lakehouse: Lakehouse, table: str, filters: Sequence[str], *, moment: Moment | None = None
) -> ForgetPlan:
    """Return the state of a request, now or at a moment, and change nothing.

    Raises `NoSuchTable`, `NoSuchColumn` or `SpecInvalid` for a request that fits no table, or matches no planned row, and
    `DataFileChanged` if a registered file has changed since it was read.
    """
    source, filters, script = lakehouse.load(table), sorted(set(filters)), sql_script("forget")
    for each in filters:
        parse_exclusion(each, source.schema(), source)
    with suppress(DataFileUnreadable, SpecInvalid):  # rows of files that are gone are found by their keys
        check_data_files(source)
    uuid, places, problems = str(source.metadata.table_uuid), [NO_PLACES], []
    merge = (lambda _: False) if moment is None else moment.restore
    with open_audit(lakehouse, query=f"{script} work_units ancestors", merge=merge) as connection:
        for plans in rows_of(connection, sql_script("planned_snapshots"), [uuid, None]):
            try:
                places.append(excluded_places(connection, source, filters, plans))
            except DlacError as err:  # the snapshot of an old plan may have expired
                keyed = keyed_places(connection, lakehouse, source, filters, plans)
                places += [] if keyed is None else [keyed]
                why = f"rows of snapshot {plans['snapshot_id']} are not counted: {type(err).__name__}: {err}"
                problems += [f"{why}; {_HOW_TO_COUNT}"] if keyed is None else []
        connection.register("matched_rows", pa.concat_tables(places))
        connection.execute("CREATE TABLE found_rows AS SELECT DISTINCT file_path, row FROM live_places('matched_rows')")
        connection.execute("CREATE TABLE forget_request AS SELECT $1 AS table_uuid, $2 AS filters", [uuid, filters])
        connection.execute(script)
        [rows], runs = rows_of(connection, "FROM forget_summary"), rows_of(connection, "FROM forget_runs")
        rows["limits"] = certificate_limits(connection)
        problems += [f"run {run}: {problem}" for run, problem in connection.execute("FROM forget_problems").fetchall()]
    if not rows["count"] and not problems and moment is None:
        raise SpecInvalid(f"expected planned rows of {table!r} that match {filters!r}, found none: check the filters")
    request = {"id": blake3(json.dumps([uuid, filters]).encode()).hexdigest(length=8), "table": table}
    return {**request, "table_uuid": uuid, "filters": filters, "rows": rows, "runs": runs, "problems": problems}
