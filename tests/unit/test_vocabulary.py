"""Dialect words that prose must not use. The field has a plain word for each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_DIALECT = re.compile(
    r"\b(behind|told|tells|nobody|whoever|whom|somebody|goes on|go on|let go|lets go|at hand|anew|alike|thus|undertaker)\b",
    re.IGNORECASE,
)
_FOLDERS = ("dlac_pipeline", "catalog", "assets", "jobs", "docs")


def _docstrings(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


def _lines() -> Iterator[tuple[str, int, str]]:
    files = [file for folder in _FOLDERS for file in sorted((_ROOT / folder).rglob("*"))]
    for name in [str(file.relative_to(_ROOT)) for file in [*files, _ROOT / "README.md"]]:
        if name.endswith(".py"):
            yield from ((name, number, text) for number, text in _docstrings(_ROOT / name))
        elif name.endswith(".md"):
            yield from ((name, number, text) for number, text in enumerate((_ROOT / name).read_text().splitlines(), 1))


def test_prose_has_no_dialect() -> None:
    """Docstrings and pages use the field's words. Code in backticks is exempt."""
    assert [
        f"{name}:{number}: {word}"
        for name, number, text in _lines()
        for word in _DIALECT.findall(re.sub(r"`[^`]*`", "", text))
    ] == []
