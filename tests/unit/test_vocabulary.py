"""Words of our own dialect that prose must not use: each has a plain word in the field."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_DIALECT = re.compile(
    r"\b(behind|told|tells|nobody|whoever|whom|somebody|goes on|go on|let go|lets go|at hand|anew|alike|thus|undertaker)\b",
    re.IGNORECASE,
)
_ALLOWED = {
    "docs/checkpoints.md": {"told"},  # a line of the log
    "dlac_pipeline/lakehouse/iceberg/safe_commit.py": {"behind"},  # a guard is before a catalog
    "docs/design/0016-rooms.md": {"told", "behind"},  # old names
}


def _docstrings(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


def _lines() -> Iterator[tuple[str, int, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "dlac_pipeline", "catalog", "assets", "jobs", "docs", "README.md"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        if name.endswith(".py"):
            yield from ((name, number, text) for number, text in _docstrings(_ROOT / name))
        elif name.endswith(".md"):
            yield from ((name, number, text) for number, text in enumerate((_ROOT / name).read_text().splitlines(), 1))


def test_prose_has_no_dialect() -> None:
    """Docstrings and pages use the field's words. Code in backticks is exempt, and so are the allowed words of a file."""
    found = [
        f"{name}:{number}: {word}"
        for name, number, text in _lines()
        for word in _DIALECT.findall(re.sub(r"`[^`]*`", "", text))
        if word.lower() not in _ALLOWED.get(name, set())
    ]
    assert found == []
