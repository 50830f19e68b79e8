"""The quickstart, as a person follows it: its files and its commands, word for word, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
_PART = re.compile(
    r'^```\w+ title="(?P<name>[^"]+)"\n(?P<text>.*?)^```$|^    (?P<command>\S[^\n]*)$', re.MULTILINE | re.DOTALL
)
_PKILL = """\
import os, re, signal, sys
import psutil
flags, pattern = sys.argv[1:-1], sys.argv[-1]
assert flags == ["-9", "-f"]
training = psutil.Process(int(os.environ["TRAINING"]))
[found] = [each for each in (training, *training.children(recursive=True)) if re.search(pattern, " ".join(each.cmdline()))]
found.send_signal(signal.SIGKILL)
"""
"""`pkill -9 -f` that sees the processes of the training alone: others of this node may have the same names."""


def page_parts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file, and "" and the command, in the order of the page."""
    for part in _PART.finditer(PAGE.read_text()):
        yield (part["name"], part["text"]) if part["name"] else ("", part["command"])


class Reader:
    """A person with the page in a folder. `programs` is the environment's folder of commands."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("PYTHONPATH", "DAGSTER_HOME", "DLAC_HOME")
            },
            **{
                "PATH": f"{programs}:/usr/bin:/bin",
                "PIP_NO_DEPS": "1",
                "PIP_NO_INDEX": "1",
                "PIP_IGNORE_INSTALLED": "1",
            },
        }
        (programs / "pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
        (programs / "dagster").write_text('#!/bin/sh\nexec python -m dagster "$@"\n')
        (programs / "pkill").write_text(f"#!{programs}/python\n{_PKILL}")
        for name in ("pip", "dagster", "pkill"):
            (programs / name).chmod(0o755)
        self._screen = folder / "screen.txt"
        self._training: subprocess.Popen[bytes] | None = None
        self._seen = 0

    def follow(self) -> None:
        """Follow the page to its end. The file that a command has written must be the one of the page."""
        for name, text in page_parts():
            if not name:
                self._enter(text)
            elif (self.folder / name).exists():
                assert (self.folder / name).read_text() == text, f"{PAGE.name} shows another {name}"
            else:
                (self.folder / name).write_text(text)

    def _enter(self, command: str) -> None:
        if command.startswith("dlac train"):
            with self._screen.open("w") as screen:
                self._training = subprocess.Popen(
                    command, shell=True, cwd=self.folder, env=self.environment, stdout=screen
                )
            self.environment["TRAINING"] = str(self._training.pid)
        elif command.startswith("pkill"):  # in the second terminal
            wait_until(lambda: self._checkpoints() > self._seen, what="the next checkpoint", within_s=120)
            self._seen = self._checkpoints()
            self.run(command)
        else:
            self.close()
            self.run(command.replace("dagster dev", "dagster definitions validate"))

    def _checkpoints(self) -> int:
        return self._screen.read_text().count("\ncheckpoint ")

    def run(self, command: str) -> str:
        """Run a command to its end, which must be a success, and return its output."""
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """Wait for the training that was killed."""
        if self._training is not None:
            assert self._training.wait(timeout=120) != 0, "the training ended before it was killed"
            self._training = None
