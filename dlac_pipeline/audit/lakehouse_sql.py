"""DuckDB over a lakehouse: DLAC's six tables as they were when it was opened, and over them alone the views of `sql/`."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from itertools import product
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import duckdb
import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, at_most, equals
from dlac_pipeline.lakehouse.iceberg.own_rows import sql_literals

QUESTIONS = (
    *("bare_path", "checkpoints", "branch_checkpoints", "lineage", "ancestors"),
    *("units", "blocks", "cut_plans", "row_positions", "touched", "consumed"),
    *("row_key", "identity_text", "keyed_files", "keys_of", "seen_by", "keys_seen", "lost_appends"),
)
"""Scripts that find the checkpoints that have seen a row. Each uses only those before it."""

_AUDIT = (
    *("or_nothing", "audited", "finishes", "advances", "cuts", "legs", "leg_sources", "leg_cuts", "live_plans"),
    *("replays", "unapplied_steps", "complete_sources", "dead_positions", "block_tiles", "intervals", "duplicates"),
    *("gaps", "passed_over"),
    *("rows_at", "readers", "rows_seen", "affected", "consumed_at", "consumed_rows", "consumed_units", "coverage"),
    *("passes", "uneven_shares", "shortfalls", "repeats", "quarantined_units", "sources", "totals"),
    *("cut_problems", "advance_problems", "leg_problems", "replay_problems", "lineage_problems", "problems"),
    *("checkpoint_costs", "exports", "verifications", "rewinds", "branches", "attempt_times", "goodput"),
)
VIEWS = (*QUESTIONS, *_AUDIT)
"""All scripts of views and macros. Each uses only those before it."""
OWN_TABLES = ("consumption", "slices", "plans", "work_units", "recoveries", "row_keys")
"""DLAC's tables. The consumption is read first, because the rows that it names are older."""
_WORDS = re.compile(r"\w+")
_DEFINITION = re.compile(r"CREATE OR REPLACE (?:VIEW|MACRO) (\w+)")
_LISTING = re.compile(r"\b(show|describe|pragma|information_schema|query_table|(duckdb|sqlite|pg)_\w+)\b")
"""Words of a query that may use any table or view without its name."""
_READING_FILES = re.compile(r"/|read_|scan|glob|sniff|parquet")
"""Texts of a query. Where it reads a data file, at least one occurs."""
_NAMED_BY = {"slices": "cut_id", "plans": "plan_id", "work_units": "write_id"}
"""The column that names the rows of other tables that the ledger of a run needs: by the values of `named_*.sql`."""
KEPT_TABLES = ("branch_checkpoints", "lineage", "advances", "cuts", "legs", "leg_sources", "leg_cuts", "live_plans")
"""Views that many others use. They are computed once, or else each of those would compute them again."""
KEPT_TABLES_OF_ONE_RUN = ("dead_positions", "block_tiles", "intervals", "uneven_shares", "repeats")
"""Further such views. They are too expensive without a run."""
AUDIT_TABLES = (*KEPT_TABLES, *KEPT_TABLES_OF_ONE_RUN)
"""Views of the audit of one run that are computed once."""
NO_PLACES = pa.schema({"plan_id": pa.string(), "file_path": pa.string(), "row": pa.int64()}).empty_table()
"""No row of a plan."""


@cache
def sql_script(name: str) -> str:
    """The text of `sql/<name>.sql`."""
    return (files(__package__) / "sql" / f"{name}.sql").read_text()


def open_audit(
    lakehouse: Lakehouse,
    *,
    run: str | None = None,
    until_seq: int | None = None,
    query: str | None = None,
    merge: Callable[[duckdb.DuckDBPyConnection], bool] = lambda _: False,
) -> duckdb.DuckDBPyConnection:
    """Open a connection with the lakehouse's tables, views and macros. With `run`, only the rows that it needs are in them.

    `until_seq`, with a run: its ledger as it was with that `seq`. `query`: only the tables, views and macros that it needs.
    DuckDB binds the whole tree below a view when it is defined. `merge` may replace rows of the tables before that. If so, it
    makes `audited` and returns True. Raises `CatalogUnreachable` if the catalog does not answer.
    """
    needed = None if query is None or _LISTING.search(query.casefold()) else names_in(query.casefold())
    # Closed after an error, too: a process that is forked later would crash when it frees an open connection as garbage.
    with ExitStack() as opened:
        connection = opened.enter_context(duckdb.connect())
        connection.execute(f"SET temp_directory = {sql_literals([f'{gettempdir()}/dlac-{uuid4().hex}'])}")
        connection.execute("ATTACH ':memory:' AS lakehouse (COMPRESS); USE lakehouse")
        mine: BooleanExpression = AlwaysTrue() if run is None else equals("run", run)
        if run is not None and until_seq is not None:
            mine = And(mine, at_most("seq", until_seq))
        for name in OWN_TABLES:
            wanted = mine if name in ("consumption", "recoveries") else AlwaysTrue()
            if run is not None and name in _NAMED_BY:
                values = connection.execute(sql_script(f"named_{name}")).fetchall()
                wanted = among(_NAMED_BY[name], [value for (value,) in values if value is not None])
            if name == "row_keys" and run is not None:  # no audit needs them, and they may be many
                connection.execute(f"CREATE TABLE {name} AS {own_rows.no_rows(name)}")
            elif needed is None or name in needed or run is not None:
                add_table(connection, lakehouse, name, wanted)
        merged = merge(connection)
        large = bool(connection.execute("FROM duckdb_views() WHERE view_name = 'consumption'").fetchall())
        if large:
            connection.execute("SET memory_limit = '1280MB'; SET preserve_insertion_order = false")
        views = VIEWS if needed is None else scripts_of(needed)
        kept = {*(KEPT_TABLES if run is None else AUDIT_TABLES)} - ({"advances"} if large else set())
        define_views(connection, [view for view in views if not (merged and view == "audited")], kept, large=large)
        opened.pop_all()
    return connection


def scripts_of(needed: Collection[str]) -> list[str]:
    """Return the scripts that define these names, each after the scripts that it uses."""
    return [name for name in VIEWS if not _words_and_names(name)[1].isdisjoint(needed)]


def names_in(query: str) -> set[str]:
    """Return the names in a query, and those in the scripts that it needs."""
    scripts = [_words_and_names(name) for name in VIEWS]
    needed = words = set(_WORDS.findall(query))
    while words:
        words = set().union(*(uses for uses, defines in scripts if words & defines)) - needed
        needed = needed | words
    if _READING_FILES.search(query):
        needed.add("work_units")  # `dlac sql` allows its data files
    return needed


@cache
def _words_and_names(script: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return all words of a script but its comments, and the names of the views and macros that it defines."""
    text = re.sub("--.*", "", sql_script(script))
    return frozenset(_WORDS.findall(text)), frozenset(_DEFINITION.findall(text))


def script_of_view(name: str, kept: Collection[str]) -> str:
    """Return the script of a view or of macros. A view of `kept` becomes a table, which is computed at once."""
    script = sql_script(name)
    return script.replace(f"CREATE OR REPLACE VIEW {name} ", f"CREATE TABLE {name} ") if name in kept else script


def define_views(
    connection: duckdb.DuckDBPyConnection, views: Iterable[str], kept: Collection[str], *, large: bool = False
) -> None:
    """Define these views on a connection. Those of `kept` are computed at once, and compressed if they may be `large`."""
    for name in views:
        connection.execute(script_of_view(name, kept))
        if large and name in kept:
            connection.execute("CHECKPOINT lakehouse")  # this compresses the table


def add_table(
    connection: duckdb.DuckDBPyConnection,
    lakehouse: Lakehouse,
    name: str,
    wanted: BooleanExpression,
    load: bool = False,
) -> None:
    """Add rows of one of DLAC's tables: as a table if there are few, or with `load`, and else as a view of its files."""
    folders = tuple(f"{folder}/" for folder in own_rows.local_paths(lakehouse.config.warehouse))

    def add(table: Table) -> None:
        files = own_rows.data_files(table, wanted)
        rows = None if files is None else own_rows.rows_in_files(table, files, wanted, folders)
        is_large = sum(each.record_count for each in files or ()) > own_rows.LARGE_ROWS
        kind = "VIEW" if is_large and rows is not None and not load else "TABLE"
        if rows is None:
            connection.register("arrow_rows", own_rows.read_rows(table, wanted))
        try:
            connection.execute(f"CREATE OR REPLACE {kind} {name} AS {rows or 'FROM arrow_rows'}")
        except duckdb.Error as err:
            raise own_rows.error_of_duckdb(table, err) from err
        connection.unregister("arrow_rows")

    lakehouse.look(name, add)


def rows_of(connection: duckdb.DuckDBPyConnection, query: str, parameters: Any = ()) -> list[dict[str, Any]]:
    """The rows of a query's answer, column name -> value."""
    answer = connection.execute(query, parameters)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def excluded_places(
    connection: duckdb.DuckDBPyConnection, table: Table, where: Sequence[str], plans: Mapping[str, Any]
) -> pa.Table:
    """Return the rows (plan_id, file_path, row) that an expression matches, of `plan_ids` of a `snapshot_id` and `schema_id`.

    Rows that the snapshot has deleted are among them. They are dead in these plans.
    """
    # It imports the grammar of filters, which most audits and `dlac status` do not need.
    from dlac_pipeline.lakehouse.iceberg.row_groups import FilesToRead, row_groups_of

    query = "SELECT DISTINCT file_path FROM units WHERE list_contains($1, plan_id)"
    paths = {path for (path,) in connection.execute(query, [plans["plan_ids"]]).fetchall()}
    schema, parts = table.schemas()[plans["schema_id"]], [NO_PLACES]
    groups = row_groups_of(table, plans["snapshot_id"], "", schema=schema, reads=FilesToRead(only=paths), exclude=where)
    for group, plan_id in product(groups, plans["plan_ids"]):
        names = [pa.repeat(each, len(group.dead)) for each in (plan_id, group.file_path)]
        parts.append(pa.table([*names, group.first_row + group.dead], schema=NO_PLACES.schema))
    return pa.concat_tables(parts)
