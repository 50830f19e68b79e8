"""The quickstart, as a person follows it: its files and its commands, word for word, in an empty folder."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import wait_until

POINTS = "1_000_000"
"""Points of a file, as the page has them."""
_PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
_PART = re.compile(
    r'^```\w+ title="(?P<name>[^"]+)"\n(?P<text>.*?)^```$|^    (?P<command>\S[^\n]*)$', re.MULTILINE | re.DOTALL
)
_AWAITED = ("\ncheckpoint ", "\nrecovered in ")
"""The line of the training that the page waits for, before each kill."""
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
    for part in _PART.finditer(_PAGE.read_text()):
        yield (part["name"], part["text"]) if part["name"] else ("", part["command"])


class Reader:
    """A person with the page in a folder, with two terminals. `programs` is the folder of commands of an environment."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        own = ("PYTHONPATH", "DAGSTER_HOME", "DLAC_HOME")
        self._environment = {name: value for name, value in os.environ.items() if name not in own}
        self._environment |= {"PATH": f"{programs}:/usr/bin:/bin"}
        self._environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"}
        self._screen = folder / "screen.txt"
        self._training: subprocess.Popen[bytes] | None = None
        self._awaited = iter(_AWAITED)
        for name, text in {
            "pip": '#!/bin/sh\nexec python -m pip "$@"\n',
            "dagster": '#!/bin/sh\nexec python -m dagster "$@"\n',
            "pkill": f"#!{programs}/python\n{_PKILL}",
        }.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def follow(self, points: str) -> None:
        """Follow the page to its end, with another number of points. A file that a command has written must be the page's."""
        for name, text in page_parts():
            path = self._folder / name
            if not name:
                self._enter(text)
            elif path.exists():
                assert path.read_text() == text, f"{_PAGE.name} shows another {name}"
            else:
                path.write_text(text.replace(POINTS, points))

    def _enter(self, command: str) -> None:
        if command.startswith("dlac train"):
            with self._screen.open("w") as screen:
                self._training = subprocess.Popen(
                    command, shell=True, cwd=self._folder, env=self._environment, stdout=screen
                )
            self._environment["TRAINING"] = str(self._training.pid)
        elif command.startswith("pkill"):
            line = next(self._awaited)
            wait_until(lambda: line in self._screen.read_text(), what=line, within_s=120)
            self.run(command)
        else:
            self.run(command.replace("dagster dev", "dagster definitions validate"))
        if command.startswith("dagster dev"):  # which loads dagster.yaml of the folder, as validation does not
            self.run(
                """DAGSTER_HOME="$PWD" python -c 'import dagster; dagster.DagsterInstance.get().run_coordinator'"""
            )

    def run(self, command: str) -> str:
        """Run a command to its end, which must be a success, and return its output."""
        done = subprocess.run(
            command, shell=True, cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End the training, if it was not killed."""
        if self._training is not None:
            self._training.terminate()
            self._training.wait(timeout=120)
