"""Macros of the audit in queries whose tables and columns have the names that the macros use."""

import re
from collections.abc import Iterator

import duckdb
import pytest

from dlac_pipeline.audit.lakehouse_sql import VIEWS, open_audit, sql_script
from tests.conftest import Arena

_MACRO = re.compile(r"CREATE OR REPLACE MACRO (\w+)\(([\w, ]+)\) AS (TABLE)?")
SCRIPTS = {name: re.sub("--.*", "", sql_script(name)) for name in VIEWS}
MACROS = {
    found[1]: (found[2].split(", "), bool(found[3])) for text in SCRIPTS.values() for found in _MACRO.finditer(text)
}
"""Macro -> its parameters, and whether it returns a table."""
_NAMES = r"\bAS (\w+)\b|\b(\w+) AS \(|\b(\w+)\.\w|\.(\w+)\b|\(([\w, ]+)\)"
_WORDS = {
    each for text in SCRIPTS.values() if _MACRO.search(text) for found in re.findall(_NAMES, text) for each in found
}
NAMES = sorted({name for words in _WORDS for name in words.lower().split(", ") if re.fullmatch(r"[a-z_]\w*", name)})
"""All aliases, columns and parameters in the scripts of macros."""
OF_COLUMNS = [name for name, (parameters, _) in MACROS.items() if not {*parameters} & {"places", "moved"}]
"""Macros without a parameter that is the name of a table."""


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """An audit of a run with row keys, and a table `arguments_of` with a value for each parameter of the macros."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Arena(tmp_path_factory.mktemp("macros") / "home", monkeypatch)
        arena.table(appends=(60, 60), row_group_rows=20)
        arena.trained("r", world_size=1, passes=1, every_steps=2, row_keys=True, identity_columns=["row_id"])
        with open_audit(arena.lakehouse) as connection:
            connection.execute(
                "CREATE TABLE arguments_of AS SELECT k.key AS wanted_key, f.file_path AS file, f.file_path AS path, "
                "k.row AS file_row, "
                "f.salt, f.identity, ['17'] AS texts, ['17'] AS identity_values, '17' AS value, 'BIGINT' AS kind, "
                "(SELECT checkpoint_id FROM lineage WHERE is_head) AS checkpoint "
                "FROM row_keys AS k JOIN keyed_files AS f USING (file) WHERE k.row = 17 ORDER BY 2 LIMIT 1"
            )
            yield connection


def ask(connection: duckdb.DuckDBPyConnection, macro: str, arguments: list[str], source: str) -> list[str]:
    """Return the sorted rows of a macro of a relation's columns."""
    call = f"{macro}({', '.join(arguments)})"
    is_table = MACROS[macro][1]
    query = f"SELECT answer FROM {source}, (FROM {call}) AS answer" if is_table else f"SELECT {call} FROM {source}"
    return sorted(map(repr, connection.execute(query).fetchall()))


@pytest.mark.slow
@pytest.mark.parametrize("macro", OF_COLUMNS)
def test_arguments_are_the_callers(audit: duckdb.DuckDBPyConnection, macro: str) -> None:
    """A macro's arguments are the caller's, whatever name of the macro's own the caller's table or columns have."""
    names = MACROS[macro][0]
    plain = ask(audit, macro, names, "arguments_of")
    assert plain
    for number, name in enumerate(NAMES):
        assert ask(audit, macro, [f'"{name}".{each}' for each in names], f'arguments_of AS "{name}"') == plain, name
        at = number % len(names)
        others = [each for each in names if each != names[at]]
        if name not in others:
            columns = ", ".join([f'{names[at]} AS "{name}"', *others])
            renamed = [*names[:at], f'"{name}"', *names[at + 1 :]]
            assert ask(audit, macro, renamed, f"(SELECT {columns} FROM arguments_of)") == plain, f"column {name}"
