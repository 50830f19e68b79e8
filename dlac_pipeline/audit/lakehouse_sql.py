"""DuckDB over a lakehouse: DLAC's five tables as Arrow, and over them the views and macros of `sql/`.

Nothing but the tables is asked: neither the order code nor a manifest. What one connection sees is what the tables held when
it was opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression

from catalog.connect import Lakehouse, among, at_most, equals

QUESTIONS = (
    "bare_path",
    "checkpoints",
    "branch_checkpoints",
    "lineage",
    "ancestors",
    "units",
    "blocks",
    "cut_plans",
    "row_positions",
    "touched",
    "consumed",
)
"""Scripts that answer who has seen a row; each uses only those before it."""

_AUDIT = (
    "said",
    "finishes",
    "advances",
    "cuts",
    "legs",
    "leg_sources",
    "leg_cuts",
    "live_plans",
    "complete_sources",
    "dead_positions",
    "intervals",
    "duplicates",
    "gaps",
    "passed_over",
    "rows_at",
    "consumed_at",
    "consumed_rows",
    "consumed_units",
    "coverage",
    "passes",
    "shortfalls",
    "repeats",
    "sources",
    "quarantined_units",
    "totals",
    "cut_problems",
    "advance_problems",
    "leg_problems",
    "lineage_problems",
    "problems",
    "checkpoint_costs",
    "exports",
    "verifications",
    "rewinds",
    "branches",
)
_PLAN_IDS = re.compile(r"\b[0-9a-f]{24}\b")
"""The content ids in the JSON of a leg or a claim."""
_KEPT = ("lineage", "advances", "cuts", "legs", "leg_sources", "leg_cuts", "live_plans")
"""Views that many others use; computed once, or each of those would compute them anew."""
_KEPT_OF_ONE_RUN = ("dead_positions", "intervals", "shortfalls", "repeats")
"""Further such views, too dear where nobody may ask for them."""


def sql_script(name: str) -> str:
    """The text of `sql/<name>.sql`."""
    return (files(__package__) / "sql" / f"{name}.sql").read_text()


def open_audit(
    lakehouse: Lakehouse, *, run: str | None = None, until_seq: int | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection in which the lakehouse's tables, views and macros can be queried; only those rows that `run` needs, if named.

    `until_seq`, with a run: its ledger as it was with that `seq`.

    Raises:
        CatalogUnreachable: the catalog does not answer.
    """
    everything = AlwaysTrue()
    # The consumption comes first: what it names was written before it.
    mine = everything if run is None else _until(run, until_seq)
    consumption = lakehouse.read_own("consumption", mine)
    cuts = everything if run is None else among("cut_id", _distinct(consumption["cut_id"]))
    slices = lakehouse.read_own("slices", cuts)
    named = everything if run is None else among("plan_id", _plans_of(consumption, slices))
    plans = lakehouse.read_own("plans", named)
    units = lakehouse.read_own(
        "work_units", everything if run is None else among("write_id", _distinct(plans["write_id"]))
    )
    recoveries = lakehouse.read_own("recoveries", mine)
    tables = {
        "consumption": consumption,
        "slices": slices,
        "plans": plans,
        "work_units": units,
        "recoveries": recoveries,
    }
    connection = duckdb.connect()
    for name, rows in tables.items():
        connection.register(name, rows)
    kept = _KEPT if run is None else (*_KEPT, *_KEPT_OF_ONE_RUN)
    for name in (*QUESTIONS, *_AUDIT):
        connection.execute(sql_script(name))
        if name in kept:
            connection.execute(f"CREATE TEMP TABLE {name} AS FROM main.{name}")  # a temporary table hides the view
    return connection


def rows_of(connection: duckdb.DuckDBPyConnection, query: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """The rows of a query's answer, column name -> value."""
    answer = connection.execute(query, list(parameters))
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def _until(run: str, seq: int | None) -> BooleanExpression:
    return equals("run", run) if seq is None else And(equals("run", run), at_most("seq", seq))


def _plans_of(consumption: pa.Table, slices: pa.Table) -> list[str]:
    """The plans that advances, slices, legs and claims name."""
    naming = consumption.filter(pc.is_in(consumption["kind"], pa.array(["leg", "claim"])))["detail"].to_pylist()
    named = (plan_id for detail in naming for plan_id in _PLAN_IDS.findall(detail or ""))
    return sorted({*_distinct(consumption["plan_id"]), *_distinct(slices["plan_id"]), *named})


def _distinct(values: pa.ChunkedArray) -> list[str]:
    return [value for value in values.unique().to_pylist() if value is not None]
