"""A stub of a rank without PyTorch: `python -I -S stub_rank.py RESUME PID PROGRESS RECORD`.

It writes its process id, waits for the resume point like a rank, writes one progress record (a finished step), and then
waits until its supervisor ends it. It reads no row, loads no state, joins no process group and commits nothing.
"""

import os
import sys
import time

_LOOK_S = 0.25
_PARENT_S = 2.0


def main() -> None:
    """Wait for the resume point, record a finished step, and wait for the end."""
    resume, pid, progress, record = sys.argv[1:]
    supervisor = os.getppid()
    _write(pid, str(os.getpid()).encode())
    while not os.path.exists(resume):
        _sleep_under(supervisor, _LOOK_S)
    _write(progress, bytes.fromhex(record))
    while True:
        _sleep_under(supervisor, _PARENT_S)


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)


def _sleep_under(supervisor: int, seconds: float) -> None:
    """Sleep, and exit if the supervisor has died."""
    time.sleep(seconds)
    if os.getppid() != supervisor:
        sys.exit(1)


if __name__ == "__main__":
    main()
