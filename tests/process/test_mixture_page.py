"""The example of the page on mixtures, run as a reader runs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked

_ROOT = Path(__file__).parents[2]
_EXAMPLES = _ROOT / "examples"
_DLAC = str(Path(sys.executable).with_name("dlac"))


@pytest.mark.slow
def test_mixture_example_is_exact(tmp_path: Path) -> None:
    """Each row of the finite source is consumed once. The repeated source has the numbers that the page shows."""
    page = (_ROOT / "docs" / "mixtures.md").read_text()
    assert all((_EXAMPLES / "mixture" / name).read_text() in page for name in ("make_tables.py", "job.toml"))
    for name in ("quickstart", "mixture"):
        shutil.copytree(_EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns(".dlac", "__pycache__"))
    for command in ([sys.executable, "make_tables.py"], [_DLAC, "train", "job.toml"]):
        _run(command, tmp_path)
    audit = json.loads(_run([_DLAC, "audit", "mixed", "--json"], tmp_path))
    assert (audit["exact"], audit["step"]) == (True, 224)
    sources = json.loads(_run([_DLAC, "sql", "--json", "FROM sources WHERE run = 'mixed' ORDER BY source"], tmp_path))
    assert [
        (each["name"], each["passes_finished"], each["rows_consumed"], each["rows_pending"]) for each in sources
    ] == [("demo.points", 1, 20_000, 0), ("demo.extra", 1, 8_672, 1_328)]


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "DLAC_HOME": ""}
    with Forked(command, cwd=folder / "mixture", env=environment, stdout=subprocess.PIPE, text=True) as process:
        output = str(process.communicate()[0])
    assert process.returncode == 0, output
    return output
