"""The page on erasure: each of its commands, in order, in a lakehouse with the run that it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlac_pipeline.extensions.erasure.forget import plan_forget
from dlac_pipeline.extensions.erasure.limits import LIMITS
from tests.conftest import Arena

_PAGE = Path(__file__).parents[3] / "docs" / "extensions" / "erasure.md"


@pytest.mark.soak
def test_page_forgets_word_for_word(arena: Arena, tmp_path: Path) -> None:
    """A person who follows the page has a certificate, which DLAC and a plain DuckDB accept."""
    arena.lakehouse.create_namespace("lake")
    arena.table("lake.docs", appends=(400,))
    spec = arena.spec("my-run", table="lake.docs", world_size=1, passes=1, every_steps=2, keep_last=0)
    (tmp_path / "job.yaml").write_text(spec.model_dump_json())
    environment = {**os.environ, "DLAC_HOME": str(arena.home)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    commands = re.findall(r"^    ((?:dlac|python) .*)$", _PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 8
    for command in ("dlac train job.yaml", *commands):
        line = command.replace("doc_id", "row_id")
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if command.startswith("python"):
            assert done.stdout == "[]\n"
    plan = plan_forget(arena.lakehouse, "lake.docs", ["row_id = 71"])
    assert plan["problems"] == []
    assert "the rows are forgotten" in subprocess.run(
        commands[0].replace("doc_id", "row_id"), shell=True, env=environment, capture_output=True, text=True, check=True
    ).stdout  # fmt: skip


def test_page_lists_each_limit() -> None:
    """The page has the sentences of the list, in their order, and no others."""
    section = _PAGE.read_text().partition("## What a certificate does not cover")[2]
    assert re.findall("^- (.*)$", section, re.MULTILINE) == list(LIMITS)
