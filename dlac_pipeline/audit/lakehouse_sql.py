"""DuckDB over a lakehouse: DLAC's five tables as Arrow, and over them the views and macros of `sql/`.

They use the tables alone, and neither the order code nor a manifest. A connection shows the tables as they were when it was
opened.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression

from dlac_pipeline.lakehouse.durable_io import temporary_beside
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, at_most, equals

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
"""Scripts that find the checkpoints that have seen a row. Each uses only those before it."""

_AUDIT = (
    "or_nothing",
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
    "rows_seen",
    "consumed_at",
    "consumed_rows",
    "consumed_units",
    "coverage",
    "passes",
    "shortfalls",
    "repeats",
    "quarantined_units",
    "sources",
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
_VIEWS = (*QUESTIONS, *_AUDIT)
_OWN = ("consumption", "slices", "plans", "work_units", "recoveries")
"""DLAC's tables. The consumption is read first, because the rows that it names are older."""
_WORDS = re.compile(r"\w+")
_DEFINITION = re.compile(r"CREATE OR REPLACE (?:VIEW|MACRO) (\w+)")
_LISTING = re.compile(r"\b(show|describe|pragma|information_schema|query_table|(duckdb|sqlite|pg)_\w+)\b")
"""Words of a query that may use any table or view without its name."""
_READING_FILES = re.compile(r"/|read_|scan|glob|sniff|parquet")
"""Texts of a query, one of which occurs where it reads a data file."""
_PLAN_IDS = re.compile(r"\b[0-9a-f]{24}\b")
"""The content ids in the JSON of a leg or a claim."""
_KEPT = ("lineage", "advances", "cuts", "legs", "leg_sources", "leg_cuts", "live_plans")
"""Views that many others use. They are computed once, or else each of those would compute them again."""
_KEPT_OF_ONE_RUN = ("dead_positions", "intervals", "shortfalls", "repeats")
"""Further such views. They are too expensive without a run."""


_READING = ("SELECT", "EXPLAIN", "MULTI", "CREATE", "DROP", "INSERT", "UPDATE", "DELETE")
"""Statements that leave files alone. Tables that they make or change are in memory."""
_WRITING = ("COPY", "EXPORT", "IMPORT", "ATTACH", "INSTALL", "LOAD", "PREPARE", "EXECUTE", "SECRET")
_BEFORE_NAMES = frozenset(
    {
        *("SELECT", "DISTINCT", "AS", "FROM", "JOIN", "WHERE", "HAVING", "ON", "AND", "OR", "NOT", "IN", "BY", "CASE"),
        *("WHEN", "THEN", "ELSE", "BETWEEN", "LIKE", "TABLE", "INTO", "UPDATE", "DESCRIBE", "SUMMARIZE", "SHOW"),
        *(".", ",", "=", "<", ">", "<=", ">=", "<>", "!=", "+", "-", "*", "/", "%", "||", "::"),
    }
)
"""Words after which one of `_WRITING` is the name of a column or a table: no statement begins there."""
_PRAGMAS = ("table_info", "show", "show_tables", "show_tables_expanded", "database_list", "storage_info", "version")
"""Pragmas that read what is in memory."""
_RUNNING = ("query", "json_execute_serialized_sql")
"""Functions that run text as SQL."""
_LOCKED = (
    "allow_persistent_secrets = false",
    "allow_community_extensions = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "python_enable_replacements = false",
)


def sql_script(name: str) -> str:
    """The text of `sql/<name>.sql`."""
    return (files(__package__) / "sql" / f"{name}.sql").read_text()


def open_audit(
    lakehouse: Lakehouse, *, run: str | None = None, until_seq: int | None = None
) -> duckdb.DuckDBPyConnection:
    """Open a connection with the lakehouse's tables, views and macros. With `run`, only the rows that it needs are loaded.

    `until_seq`, with a run: its ledger as it was with that `seq`.

    Raises:
        CatalogUnreachable: the catalog does not answer.
    """
    kept = _KEPT if run is None else (*_KEPT, *_KEPT_OF_ONE_RUN)
    return _define(_own_tables(lakehouse, run, until_seq), _VIEWS, kept)


def open_query(lakehouse: Lakehouse, query: str) -> duckdb.DuckDBPyConnection:
    """Open a connection with the tables, views and macros that a query needs.

    DuckDB binds the whole tree below a view when it is defined. For all views that takes seconds.

    Raises:
        CatalogUnreachable: the catalog does not answer.
    """
    query = query.casefold()
    if _LISTING.search(query):
        return open_audit(lakehouse)
    scripts = {name: _words_and_names(name) for name in _VIEWS}
    needed = words = set(_WORDS.findall(query))
    while words:
        words = set().union(*(uses for uses, defines in scripts.values() if words & defines)) - needed
        needed = needed | words
    if _READING_FILES.search(query):
        needed.add("work_units")  # `lock_to_lakehouse` allows its data files
    tables = {name: lakehouse.read_own(name) for name in _OWN if name in needed}
    return _define(tables, [name for name, (_, defines) in scripts.items() if needed & defines], _KEPT)


@cache
def _words_and_names(script: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return all words of a script, and the names of the views and macros that it defines."""
    text = sql_script(script)
    return frozenset(_WORDS.findall(text)), frozenset(_DEFINITION.findall(text))


def _define(tables: dict[str, pa.Table], views: Iterable[str], kept: Collection[str]) -> duckdb.DuckDBPyConnection:
    """Return a connection with these tables and views. Those of `kept` are computed at once."""
    connection = duckdb.connect()
    for name, rows in tables.items():
        connection.register(name, rows)
    for name in views:
        connection.execute(sql_script(name))
        if name in kept:
            connection.execute(f"CREATE TEMP TABLE {name} AS FROM main.{name}")  # a temporary table hides the view
    return connection


def write_database(lakehouse: Lakehouse, path: Path) -> None:
    """Write the lakehouse's tables, with the views and macros over them, to a DuckDB file that is read without DLAC.

    Raises:
        SpecInvalid: the file exists, or cannot be made.
    """
    if path.exists():
        raise SpecInvalid(
            f"expected the name of a new file, found the file {str(path)!r}: remove it, or name another one"
        )
    tables = _own_tables(lakehouse, None, None)
    try:
        with temporary_beside(path) as temporary:
            with duckdb.connect(str(temporary)) as connection:
                for name, rows in tables.items():
                    connection.register(f"arrow_{name}", rows)
                    connection.execute(f"CREATE TABLE {name} AS FROM arrow_{name}")
                    connection.unregister(f"arrow_{name}")
                for name in _VIEWS:
                    connection.execute(sql_script(name))
            temporary.rename(path)
    except (duckdb.IOException, OSError) as err:
        raise SpecInvalid(f"expected to write the DuckDB file {str(path)!r}, found {err}: name another place") from err


def _own_tables(lakehouse: Lakehouse, run: str | None, until_seq: int | None) -> dict[str, pa.Table]:
    """Return DLAC's tables, with a run only the rows that it needs."""
    everything = AlwaysTrue()
    mine: BooleanExpression = everything if run is None else equals("run", run)
    if run is not None and until_seq is not None:
        mine = And(mine, at_most("seq", until_seq))
    consumption = lakehouse.read_own("consumption", mine)
    cuts = everything if run is None else among("cut_id", _distinct(consumption["cut_id"]))
    slices = lakehouse.read_own("slices", cuts)
    named = everything if run is None else among("plan_id", _plans_of(consumption, slices))
    plans = lakehouse.read_own("plans", named)
    units = lakehouse.read_own(
        "work_units", everything if run is None else among("write_id", _distinct(plans["write_id"]))
    )
    recoveries = lakehouse.read_own("recoveries", mine)
    return dict(zip(_OWN, (consumption, slices, plans, units, recoveries), strict=True))


def lock_to_lakehouse(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse) -> None:
    """Let the connection read files in a local warehouse and data files that plans name, and no others, for good.

    No extension is loaded, no variable of this process is found by its name, and no setting can be changed any more.
    """
    folders = _local_paths(lakehouse.config.warehouse)
    is_loaded = connection.execute("FROM duckdb_views() WHERE view_name = 'work_units'").fetchall()
    named = connection.execute("SELECT DISTINCT file_path FROM work_units").fetchall() if is_loaded else []
    planned = sorted(path for (address,) in named for path in _local_paths(address))
    for setting in _LOCKED:
        connection.execute(f"SET {setting}")
    connection.execute(f"SET allowed_directories = {_listed(folders)}")
    connection.execute(f"SET allowed_paths = {_listed(planned)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def check_reads_only(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Check that a query writes no file: DuckDB writes wherever it may read.

    A COPY may be inside of a SELECT, and a function may run text as SQL.

    Raises:
        SpecInvalid: it has a statement or a function that might.
        duckdb.Error: it cannot be parsed.
    """
    # DuckDB reads characters that are not printable as spaces
    query = "".join(" " if each > "\x7f" and not each.isprintable() else each for each in query)
    statements = connection.extract_statements(query)
    found = [each.type.name for each in statements if each.type.name not in _READING and not _is_pragma(each.query)]
    words = [("", None), *_words_of(query), ("", None)]
    for (before, _), (word, kind), (after, _) in zip(words, words[1:], words[2:], strict=False):
        writes = kind == duckdb.token_type.keyword and word.upper() in _WRITING
        # The body of a WITH is the only statement after a parenthesis: it may be a COPY, and none of the others.
        is_name = before.upper() in _BEFORE_NAMES or (before == "(" and (word.upper() != "COPY" or after in (")", ",")))
        if (writes and not is_name) or (word.strip('"').casefold() in _RUNNING and after.startswith("(")):
            found.append(word)
    if found:
        raise SpecInvalid(
            f"expected SQL that only reads, found {found[0]!r}: write a name in double quotes, or add --allow-files to read and "
            "write any file"
        )


def _is_pragma(statement: str) -> bool:
    """Return whether a statement is one of the pragmas that only read."""
    words = [word.casefold() for word, _ in _words_of(statement)]
    return words[:1] == ["pragma"] and words[1:2] != [] and words[1] in _PRAGMAS and "=" not in words


def _words_of(query: str) -> list[tuple[str, Any]]:
    """Return the words of a query and what they are, without its comments."""
    text, tokens = query.encode(), duckdb.tokenize(query)
    ends = [*(at for at, _ in tokens[1:]), len(text)]
    words = [
        (text[at:end].decode(errors="replace").strip(), kind) for (at, kind), end in zip(tokens, ends, strict=True)
    ]
    return [(word, kind) for word, kind in words if kind != duckdb.token_type.comment]


def _local_paths(address: str) -> list[str]:
    """Return the local path of an address as it is written and as it is resolved. Empty for an address elsewhere."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme != "file":
        return []
    path = "/" + (rest if colon else address).lstrip("/")
    return sorted({path, str(Path(path).resolve())})


def _listed(paths: Sequence[str]) -> str:
    return "[" + ", ".join("'" + path.replace("'", "''") + "'" for path in paths) + "]"


def rows_of(connection: duckdb.DuckDBPyConnection, query: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """The rows of a query's answer, column name -> value."""
    answer = connection.execute(query, list(parameters))
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def _plans_of(consumption: pa.Table, slices: pa.Table) -> list[str]:
    """The plans that advances, slices, legs and claims name."""
    naming = consumption.filter(pc.is_in(consumption["kind"], pa.array(["leg", "claim"])))["detail"].to_pylist()
    named = (plan_id for detail in naming for plan_id in _PLAN_IDS.findall(detail or ""))
    return sorted({*_distinct(consumption["plan_id"]), *_distinct(slices["plan_id"]), *named})


def _distinct(values: pa.ChunkedArray) -> list[str]:
    return [value for value in values.unique().to_pylist() if value is not None]
