"""Kills the ranks' process groups when their supervisor dies without a word: `python undertaker.py LAUNCH_FOLDER`.

The kernel kills the ranks themselves then; what they have started, in their process groups, has nobody else. Which groups these
are, the ranks have written into their launch folder before their script began. Standard input ends when the supervisor does; who
says something on it before has ended the ranks itself. A program of its own that imports little: one runs beside each launch.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Wait for the end of standard input."""
    if sys.stdin.buffer.read():
        return
    for file in Path(sys.argv[1]).glob("pid-*"):
        with suppress(OSError, ValueError):  # gone, or not written yet: such a rank has started nothing
            os.killpg(int(file.read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main()
