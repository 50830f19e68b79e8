"""The door of macros: `rows_of_step`, and the macro of another author, answer the calls in a query of `dlac sql`."""

import json
from pathlib import Path

import pytest

from dlac_pipeline.extensions.auditors.commands import MACROS
from tests.conftest import Arena
from tests.fixtures import Command
from tests.installed import install_distribution

_TWICE = """
def define(connection, lakehouse, query, spec_of):
    connection.execute("CREATE OR REPLACE MACRO twice(x) AS 2 * x")
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a macro of another distribution, and one whose module is missing."""
    (site := tmp_path / "site").mkdir()
    points = {MACROS.group: ["twice = twice_macro:define", "torn = torn_macro:define"]}
    install_distribution(site, "twice", {"twice_macro": _TWICE}, points)
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.parametrize("query", ["SELECT Twice(21) AS found", "SELECT 42 AS found"])
def test_macro_is_defined_for_calls(arena: Arena, here: Command, query: str) -> None:
    """A query with calls is answered, and one without any loads no macro."""
    assert json.loads(here("sql", query, "--json", home=arena.home).stdout) == [{"found": 42}]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("FROM rows_of_step('none', 1 + 1)", "expected literals as in FROM rows_of_step"),
        ("SELECT torn(1)", "expected SQL = 'torn' to load"),
    ],
)
def test_macro_that_fails_is_named(arena: Arena, here: Command, query: str, message: str) -> None:
    """Arguments that a macro refuses, and a macro that cannot be imported, are bad input."""
    refused = here("sql", query, home=arena.home)
    assert (refused.returncode, message in " ".join(refused.stderr.split())) == (64, True)
