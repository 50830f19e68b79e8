"""Groups of tests that one process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import group_of

CONFTEST = """
from tests.scheduling import GroupScheduling

def pytest_xdist_make_scheduler(config, log):
    return GroupScheduling(config, log)
"""
CRASHING = """
import os
from pathlib import Path

import pytest

def test_crashes_once():
    if not (crashed := Path(__file__).with_suffix(".crashed")).exists():
        crashed.touch()
        os._exit(1)
"""


def test_shared_lakehouse_is_one_group() -> None:
    """Modules that share a trained lakehouse are in one group. Any other module is a separate group."""
    assert (
        group_of("tests/integration/test_audit.py") == group_of("tests/integration/test_audit_tampering.py") == "lake"
    )
    assert group_of("tests/process/test_scheduling.py") == "tests/process/test_scheduling.py"


def test_campaign_modules_are_two_groups() -> None:
    """Their tests take long, so they are spread over a few processes. Each process trains the reference run once."""
    modules = sorted((Path(__file__).parents[1] / "faults").glob("test_*.py"))
    groups = {group_of(f"tests/faults/{path.name}") for path in modules}
    assert {group for group in groups if group.startswith("campaign")} == {f"campaign {n}" for n in range(2)}


@pytest.mark.slow
def test_crashed_process_is_replaced(tmp_path: Path) -> None:
    """A process that crashes in its last test, after other groups, is replaced by one that runs this test and ends."""
    (tmp_path / "tests").symlink_to(Path(__file__).parents[1])
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").touch()
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_passes(): pass\n")
    (tmp_path / "test_z.py").write_text(CRASHING)
    modules = sorted(path.name for path in tmp_path.glob("test_*.py"))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "--dist", "loadgroup", *modules],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 failed, 7 passed" in ended.stdout, ended.stdout + ended.stderr
