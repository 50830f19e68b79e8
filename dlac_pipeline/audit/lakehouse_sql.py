"""DuckDB over a lakehouse: DLAC's six tables as they were when it was opened, and over them alone the views of `sql/`."""

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import duckdb
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.durable_io import temporary_beside
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, at_most, equals
from dlac_pipeline.lakehouse.iceberg.own_rows import sql_literals
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path

QUESTIONS = (
    *("bare_path", "checkpoints", "branch_checkpoints", "lineage", "ancestors"),
    *("units", "blocks", "cut_plans", "row_positions", "touched", "consumed"),
    *("row_key", "identity_text", "keyed_files", "keys_of", "seen_by", "keys_seen", "lost_appends"),
)
"""Scripts that find the checkpoints that have seen a row. Each uses only those before it."""

_AUDIT = (
    *("or_nothing", "audited", "finishes", "advances", "cuts", "legs", "leg_sources", "leg_cuts", "live_plans"),
    *("complete_sources", "dead_positions", "block_tiles", "intervals", "duplicates", "gaps", "passed_over"),
    *("rows_at", "readers", "rows_seen", "affected", "consumed_at", "consumed_rows", "consumed_units", "coverage"),
    *("passes", "uneven_shares", "shortfalls", "repeats", "quarantined_units", "sources", "totals"),
    *("cut_problems", "advance_problems", "leg_problems", "lineage_problems", "problems"),
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
_READING = ("SELECT", "EXPLAIN", "MULTI", "CREATE", "DROP", "INSERT", "UPDATE", "DELETE")
"""Statements that leave files alone. Tables that they make or change are in memory."""
_WRITING = ("COPY", "EXPORT", "IMPORT", "ATTACH", "INSTALL", "LOAD", "PREPARE", "EXECUTE", "SECRET")
_BEFORE_NAMES = {
    *("SELECT", "DISTINCT", "AS", "FROM", "JOIN", "WHERE", "HAVING", "ON", "AND", "OR", "NOT", "IN", "BY", "CASE"),
    *("WHEN", "THEN", "ELSE", "BETWEEN", "LIKE", "TABLE", "INTO", "UPDATE", "DESCRIBE", "SUMMARIZE", "SHOW"),
    *(".", ",", "=", "<", ">", "<=", ">=", "<>", "!=", "+", "-", "*", "/", "%", "||", "::"),
}
"""Words after which one of `_WRITING` is the name of a column or a table: no statement begins there."""
_PRAGMAS = ("table_info", "show", "show_tables", "show_tables_expanded", "database_list", "storage_info", "version")
"""Pragmas that read memory only."""
_RUNNING = ("query", "json_execute_serialized_sql")
"""Functions that run text as SQL."""


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
                _add_table(connection, lakehouse, name, wanted)
        merged = merge(connection)
        large = bool(connection.execute("FROM duckdb_views() WHERE view_name = 'consumption'").fetchall())
        if large:
            connection.execute("SET memory_limit = '1280MB'; SET preserve_insertion_order = false")
        views = VIEWS if needed is None else scripts_of(needed)
        kept = {*(KEPT_TABLES if run is None else AUDIT_TABLES)} - ({"advances"} if large else set())
        _define(connection, [view for view in views if not (merged and view == "audited")], kept, large=large)
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
        needed.add("work_units")  # `lock_to_lakehouse` allows its data files
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


def _define(
    connection: duckdb.DuckDBPyConnection, views: Iterable[str], kept: Collection[str], *, large: bool = False
) -> None:
    """Define these views on a connection. Those of `kept` are computed at once, and compressed if they may be `large`."""
    for name in views:
        connection.execute(script_of_view(name, kept))
        if large and name in kept:
            connection.execute("CHECKPOINT lakehouse")  # this compresses the table


def write_database(lakehouse: Lakehouse, path: Path) -> None:
    """Write the tables, views and macros to a new DuckDB file, which is read without DLAC. Raises `SpecInvalid` if it cannot."""
    if path.exists() or path.is_symlink():
        raise SpecInvalid(
            f"expected the name of a new file, found the file {str(path)!r}: remove it, or name another one"
        )
    try:
        with temporary_beside(path) as temporary:
            with duckdb.connect(str(temporary)) as connection:
                for name in OWN_TABLES:
                    _add_table(connection, lakehouse, name, AlwaysTrue(), load=True)
                _define(connection, VIEWS, ())
            temporary.rename(path)
    except (duckdb.IOException, OSError) as err:
        raise SpecInvalid(f"expected to write the DuckDB file {str(path)!r}, found {err}: name another place") from err


def _add_table(
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


def lock_to_lakehouse(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse) -> None:
    """Let the connection read files in a local warehouse and data files that plans name, and no others, for good.

    No extension is loaded, no variable of this process is found by its name, and no setting can be changed any more.
    """
    folders = own_rows.local_paths(lakehouse.config.warehouse)
    is_added = ("work_units",) in connection.execute("SHOW TABLES").fetchall()
    named = connection.execute("SELECT DISTINCT file_path FROM work_units").fetchall() if is_added else []
    # they need no permission of their own, and to resolve many takes long
    below = tuple(f"{folder}/" for folder in folders)
    elsewhere = [address for (address,) in named if not (raw_path(address) or "").startswith(below)]
    planned = sorted(path for address in elsewhere for path in own_rows.local_paths(address))
    connection.execute(sql_script("locked"))
    connection.execute(f"SET allowed_directories = [{sql_literals(folders)}]")
    connection.execute(f"SET allowed_paths = [{sql_literals(planned)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def check_reads_only(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Check that a query writes no file: DuckDB writes wherever it may read.

    A COPY may be inside of a SELECT, and a function may run text as SQL. Raises `SpecInvalid` for a statement or a function
    that might write, and `duckdb.Error` for a query that cannot be parsed.
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
    """Return the words of a query and their kinds, without its comments."""
    text, tokens = query.encode(), duckdb.tokenize(query)
    ends = [*(at for at, _ in tokens[1:]), len(text)]
    words = [
        (text[at:end].decode(errors="replace").strip(), kind) for (at, kind), end in zip(tokens, ends, strict=True)
    ]
    return [(word, kind) for word, kind in words if kind != duckdb.token_type.comment]


def rows_of(connection: duckdb.DuckDBPyConnection, query: str, parameters: Any = ()) -> list[dict[str, Any]]:
    """The rows of a query's answer, column name -> value."""
    answer = connection.execute(query, parameters)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
