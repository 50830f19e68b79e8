"""DuckDB over a lakehouse: DLAC's five tables, and over them the views and macros of `sql/`.

They use the tables alone, and neither the order code nor a manifest. A connection shows the tables as they were when it was
opened.
"""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import duckdb
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import FileScanTask, Table

from dlac_pipeline.lakehouse.durable_io import temporary_beside
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, at_most
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path
from dlac_pipeline.lakehouse.ledger.schemas import TABLES

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
_COMMENTS = re.compile(r"--.*")
_DEFINITION = re.compile(r"CREATE OR REPLACE (?:VIEW|MACRO) (\w+)")
_LISTING = re.compile(r"\b(show|describe|pragma|information_schema|query_table|(duckdb|sqlite|pg)_\w+)\b")
"""Words of a query that may use any table or view without its name."""
_READING_FILES = re.compile(r"/|read_|scan|glob|sniff|parquet")
"""Texts of a query, one of which occurs where it reads a data file."""
_PLANS_OF = r"""
SELECT DISTINCT plan_id FROM (
    SELECT plan_id FROM consumption
    UNION ALL
    SELECT plan_id FROM slices
    UNION ALL
    SELECT unnest(regexp_extract_all(detail, '\b[0-9a-f]{24}\b')) FROM consumption WHERE kind IN ('leg', 'claim')
) WHERE plan_id IS NOT NULL
"""
"""The plans that advances, slices, and the JSON of legs and claims name."""
_LOADED_ROWS = 250_000
"""Rows up to which a table is loaded once. The files of a larger one are read by each query, as far as it needs them."""
_GLOBBING = re.compile(r"[*?\[\]]")
"""Characters for which DuckDB looks for other files than the named one."""
_KEPT = ("branch_checkpoints", "lineage", "advances", "cuts", "legs", "leg_sources", "leg_cuts", "live_plans")
"""Views that many others use. They are computed once, or else each of those would compute them again."""
_LARGE = ("advances", "cuts", "live_plans")
"""Those of them that read every advance. They are not computed at once for a ledger that is not loaded."""
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
    """Open a connection with the lakehouse's tables, views and macros. With `run`, only the rows that it needs are in them.

    `until_seq`, with a run: its ledger as it was with that `seq`.

    Raises:
        CatalogUnreachable: the catalog does not answer.
    """
    connection = _connect()
    _add_tables(connection, lakehouse, run, until_seq)
    return _define(connection, _VIEWS, _kept(connection) if run is None else (*_KEPT, *_KEPT_OF_ONE_RUN))


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
    connection = _connect()
    for name in _OWN:
        if name in needed:
            _add_table(connection, lakehouse, name)
    return _define(connection, [name for name, (_, defines) in scripts.items() if needed & defines], _kept(connection))


@cache
def _words_and_names(script: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return all words of a script but its comments, and the names of the views and macros that it defines."""
    text = _COMMENTS.sub("", sql_script(script))
    return frozenset(_WORDS.findall(text)), frozenset(_DEFINITION.findall(text))


def _connect() -> duckdb.DuckDBPyConnection:
    """Return a connection to a database in memory whose tables are compressed. What exceeds its memory goes to a folder."""
    connection = duckdb.connect()
    connection.execute(f"SET temp_directory = {sql_literal(f'{gettempdir()}/dlac-duckdb-{os.getpid()}')}")
    connection.execute("ATTACH ':memory:' AS lakehouse (COMPRESS); USE lakehouse")
    return connection


def _kept(connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
    """Return the views to compute at once, without those that are large where the ledger is not loaded."""
    is_loaded = "consumption" not in _names_of(connection, "views")
    return tuple(name for name in _KEPT if is_loaded or name not in _LARGE)


def _define(
    connection: duckdb.DuckDBPyConnection, views: Iterable[str], kept: Collection[str]
) -> duckdb.DuckDBPyConnection:
    """Define these views on a connection, and return it. Those of `kept` are computed at once."""
    for name in views:
        connection.execute(sql_script(name))
        if name in kept:
            connection.execute(f"CREATE TABLE kept AS FROM {name}; DROP VIEW {name}; ALTER TABLE kept RENAME TO {name}")
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
    try:
        with temporary_beside(path) as temporary:
            with duckdb.connect(str(temporary)) as connection:
                for name in _OWN:
                    _add_table(connection, lakehouse, name, load=True)
                _define(connection, _VIEWS, ())
            temporary.rename(path)
    except (duckdb.IOException, OSError) as err:
        raise SpecInvalid(f"expected to write the DuckDB file {str(path)!r}, found {err}: name another place") from err


def _add_tables(
    connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse, run: str | None, until_seq: int | None
) -> None:
    """Add DLAC's tables, with a run only the rows that it needs."""

    def add(name: str, column: str, query: str) -> None:
        values = None if run is None else [value for (value,) in connection.execute(query).fetchall()]
        _add_table(connection, lakehouse, name, column, values)

    mine = None if run is None else [run]
    _add_table(connection, lakehouse, "consumption", "run", mine, until_seq=until_seq)
    add("slices", "cut_id", "SELECT DISTINCT cut_id FROM consumption WHERE cut_id IS NOT NULL")
    add("plans", "plan_id", _PLANS_OF)
    add("work_units", "write_id", "SELECT DISTINCT write_id FROM plans WHERE write_id IS NOT NULL")
    _add_table(connection, lakehouse, "recoveries", "run", mine)


def _add_table(
    connection: duckdb.DuckDBPyConnection,
    lakehouse: Lakehouse,
    name: str,
    column: str = "",
    values: Sequence[str] | None = None,
    *,
    until_seq: int | None = None,
    load: bool = False,
) -> None:
    """Add one of DLAC's tables, or its rows with one of `values` in `column`: loaded if it is small, else as a view of its files.

    DuckDB reads the Parquet files of a local warehouse. It has no credentials for others, whose rows come through PyIceberg.
    """
    wanted: BooleanExpression = AlwaysTrue() if values is None else among(column, values)
    condition = "true" if values is None else "false" if not values else f"{column} IN ({_joined(values)})"
    if until_seq is not None:
        wanted, condition = And(wanted, at_most("seq", until_seq)), f"{condition} AND seq <= {until_seq}"

    def add(table: Table) -> None:
        tasks = list(table.scan(wanted).plan_files())
        paths = _readable_paths(lakehouse, tasks)
        rows = f"read_parquet([{_joined(paths)}], union_by_name = true, hive_partitioning = false) WHERE {condition}"
        if not paths:
            rows = "pyiceberg_rows"
            connection.register(rows, table.scan(wanted).to_arrow())
        is_small = load or not paths or sum(task.file.record_count for task in tasks) <= _LOADED_ROWS
        connection.execute(
            f"CREATE OR REPLACE {'TABLE' if is_small else 'VIEW'} {name} AS {no_rows(name)} UNION ALL BY NAME FROM {rows}"
        )
        if not paths:
            connection.unregister(rows)

    lakehouse.look(name, add)


def _readable_paths(lakehouse: Lakehouse, tasks: Sequence[FileScanTask]) -> list[str]:
    """Return the paths of data files that DuckDB reads as they are. Empty: it cannot read one of them.

    Raises:
        FileNotFoundError: one is missing.
    """
    folders, found = _local_paths(lakehouse.config.warehouse), []
    for task in tasks:
        path = raw_path(task.file.file_path)
        path = None if path is None else lakehouse.relocation.here(path)
        is_known = path is not None and any(path.startswith(f"{folder}/") for folder in folders)
        if path is None or not is_known or task.delete_files or _GLOBBING.search(path):
            return []
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        found.append(path)
    return sorted(found)


def lock_to_lakehouse(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse) -> None:
    """Let the connection read files in a local warehouse and data files that plans name, and no others, for good.

    No extension is loaded, no variable of this process is found by its name, and no setting can be changed any more.
    """
    folders = _local_paths(lakehouse.config.warehouse)
    is_added = "work_units" in _names_of(connection, "views") | _names_of(connection, "tables")
    named = connection.execute("SELECT DISTINCT file_path FROM work_units").fetchall() if is_added else []
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
    return f"[{_joined(paths)}]"


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(map(sql_literal, texts))


def sql_literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


@cache
def no_rows(name: str) -> str:
    """Return a query with the columns of one of DLAC's tables, and no row."""
    schema, _ = TABLES[name]
    empty: Any = schema_to_pyarrow(schema, include_field_ids=False).empty_table()
    with duckdb.connect() as connection:
        connection.register("empty", empty)
        columns = connection.execute("DESCRIBE empty").fetchall()
    return f"SELECT {', '.join(f'NULL::{kind} AS {column}' for column, kind, *_ in columns)} WHERE false"


def _names_of(connection: duckdb.DuckDBPyConnection, kind: str) -> set[str]:
    """Return the names of the views, or of the tables, of a connection."""
    found = connection.execute(
        f"SELECT {kind.removesuffix('s')}_name FROM duckdb_{kind}() WHERE NOT internal"
    ).fetchall()
    return {name for (name,) in found}


def rows_of(connection: duckdb.DuckDBPyConnection, query: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """The rows of a query's answer, column name -> value."""
    answer = connection.execute(query, list(parameters))
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
