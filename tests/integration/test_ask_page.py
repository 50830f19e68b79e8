"""The page of questions about data: each of its commands, in order, gives the output that the page shows."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "audit.md"


@pytest.mark.soak
def test_page_answers_as_shown(tmp_path: Path) -> None:
    """Ids of checkpoints, digests, paths and hours differ with each run. All else is as on the page."""
    shutil.copytree(_ROOT / "examples" / "ask", tmp_path / "examples" / "ask")
    environment = {name: value for name, value in os.environ.items() if name != "DLAC_HOME"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "COLUMNS": "160"}
    questions = 0
    for command, expected in commands():
        line = command.replace("'/lake/", f"'{tmp_path}/")
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if expected:
            questions += 1
            assert masked(done.stdout.replace(str(tmp_path), "/lake")) == masked(expected), command
    assert questions == 10


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command of the page's consoles, and the output that the page shows."""
    for console in re.findall(r"^```console\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for part in console.split("$ ")[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def masked(output: str) -> list[list[str]]:
    """Return the words of each line, without what differs from run to run. Other processors round losses differently."""
    text = re.sub(r"\b[0-9a-f]{8,}\b", "ID", output.replace(socket.gethostname(), "node-1"))
    text = re.sub(r"(hours to replay +).*", r"\1HOURS", text)
    text = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2g}", text)
    return [words for line in re.sub(r"[─━┌┐└┘├┤┏┓┗┛┡┩╇┳│┃]+", " ", text).splitlines() if (words := line.split())]
