"""Queries of auditors: SQL that may only read the lakehouse, and a DuckDB file with its tables."""

from pathlib import Path
from typing import Any

import duckdb
from pyiceberg.expressions import AlwaysTrue

from dlac_pipeline.audit.lakehouse_sql import OWN_TABLES, VIEWS, add_table, define_views, sql_script
from dlac_pipeline.lakehouse.durable_io import temporary_beside
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.own_rows import sql_literals
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path

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
                    add_table(connection, lakehouse, name, AlwaysTrue(), load=True)
                define_views(connection, VIEWS, ())
            temporary.rename(path)
    except (duckdb.IOException, OSError) as err:
        raise SpecInvalid(f"expected to write the DuckDB file {str(path)!r}, found {err}: name another place") from err


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
