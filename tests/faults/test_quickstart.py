"""The quickstart, run with the commands of its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import wait_until

_ROOT = Path(__file__).parents[2]
_FILES = ("make_table.py", "train.py", "job.toml")
_PAGE = (_ROOT / "docs" / "quickstart.md").read_text()
_DLAC = Path(sys.executable).with_name("dlac")


@pytest.mark.parametrize("name", _FILES)
def test_page_shows_example_files(name: str) -> None:
    """The page repeats each file of examples/quickstart."""
    assert (_ROOT / "examples" / "quickstart" / name).read_text() in _PAGE


def test_quickstart_stays_short() -> None:
    """A reader types fewer than 60 lines."""
    lines = [(_ROOT / "examples" / "quickstart" / name).read_text().splitlines() for name in _FILES]
    assert sum(map(len, lines)) < 60


def test_quickstart_survives_kill(tmp_path: Path) -> None:
    """The rank is killed after a checkpoint. The run finishes, and the audit is exact.

    The patterns with which the page kills match the rank only, and the supervisor only.
    """
    for name in _FILES:
        shutil.copy(_ROOT / "examples" / "quickstart" / name, tmp_path)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("time.sleep(0.05)", "time.sleep(0.02)"))  # no person kills it by hand
    environment = {**os.environ, "DLAC_HOME": ""}
    subprocess.run([sys.executable, "make_table.py"], cwd=tmp_path, env=environment, check=True)
    training = subprocess.Popen([str(_DLAC), "train", "job.toml"], cwd=tmp_path, env=environment)
    try:
        checkpoints = tmp_path / ".dlac" / "checkpoints" / "first"
        wait_until(lambda: any(checkpoints.glob("committed-*.json")), what="the first checkpoint")
        (rank,), (supervisor,) = (_matching(training, pattern) for pattern in re.findall(r'pkill -9 -f "(.+)"', _PAGE))
        assert supervisor.pid == training.pid
        rank.send_signal(signal.SIGKILL)
        assert training.wait(timeout=120) == 0
    finally:
        training.kill()
        training.wait()
    assert len(_facts(tmp_path, environment, "incidents")) == 1
    audit = _facts(tmp_path, environment, "audit")
    assert (audit["exact"], audit["rows_consumed"]) == (True, 20_000)


def _matching(training: subprocess.Popen[bytes], pattern: str) -> list[psutil.Process]:
    """Return the processes of a launch whose command line matches, as `pkill -f` finds them."""
    supervisor = psutil.Process(training.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    return [each for each in processes if re.search(pattern, " ".join(each.cmdline()))]


def _facts(folder: Path, environment: dict[str, str], command: str) -> Any:
    arguments = [str(_DLAC), command, "first", "--json"]
    return json.loads(subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, check=True).stdout)
