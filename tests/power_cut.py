"""Power cuts: the content of a disk after a power loss at any moment of a program's run.

`tests/programs/power_cut.c`, preloaded into the program, records every fsync and fdatasync. A cut rebuilds the folder from
these records: the last synced content of each file, and the last synced names of each folder. This is the guarantee of
POSIX, which is weaker than that of most file systems.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

_SOURCE = Path(__file__).parent / "programs" / "power_cut.c"
_ROOT = "root"
Names = Literal["synced", "early"]
"""The names that survive: the synced ones, or all. File systems may write names before contents."""


class Disk:
    """A folder `root` whose programs can lose power. It is new and empty when the recording begins."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root = root
        self._log = log
        root.mkdir()
        log.mkdir()
        (log / "log").touch()
        self._library = log / "power_cut.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self._library, _SOURCE, "-ldl"], check=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that record a program."""
        recorded = {"LD_PRELOAD": self._library, "POWER_ROOT": self.root.resolve(), "POWER_LOG": self._log}
        return {**os.environ, **{name: str(value) for name, value in recorded.items()}}

    @property
    def moments(self) -> int:
        """Number of moments of a possible power cut: at the start, and after each record."""
        return len(self._records()) + 1

    def marks(self, moment: int) -> list[str]:
        """Return what the program had written with `mark` at a moment, oldest first."""
        return [record[1] for record in self._records()[:moment] if record[0] == "mark"]

    def cut(self, moment: int, names: Names = "synced") -> None:
        """Turn the folder into the result of a power cut at a moment. No program may run in it."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        synced = [record for record in self._records()[:moment] if record[0] != "mark"]
        contents = {inode: self._log / copy for kind, inode, copy, _ in synced if kind == "file"}
        if names == "early":
            for kind, inode, path in self._names(synced[-1][3]) if synced else ():
                _make(self.root / path, kind, contents.get(inode))
            return
        self._fill(self.root, _ROOT, {inode: copy for kind, inode, copy, _ in synced if kind == "folder"}, contents)

    def _fill(self, folder: Path, inode: str, folders: Mapping[str, str], contents: Mapping[str, Path]) -> None:
        for kind, child, name in self._names(folders[inode]) if inode in folders else ():
            _make(folder / name, kind, contents.get(child))
            if kind == "d":
                self._fill(folder / name, child, folders, contents)

    def _records(self) -> list[list[str]]:
        return [line.split(" ") for line in (self._log / "log").read_text().splitlines()]

    def _names(self, copy: str) -> Iterator[list[str]]:
        for line in (self._log / copy).read_text().splitlines():
            yield line.split(" ", 2)


def mark(text: str) -> None:
    """Record an acknowledgement in a recorded program. Every later power cut must keep what was acknowledged."""
    with open(os.path.join(os.environ["POWER_LOG"], "log"), "a") as log:
        log.write(f"mark {text}\n")


def _make(path: Path, kind: str, content: Path | None) -> None:
    """Make a folder or a file. A file without synced content is empty."""
    if kind == "d":
        path.mkdir()
    elif content is None:
        path.touch()
    else:
        shutil.copyfile(content, path)
