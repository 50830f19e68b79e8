"""The orchestrator that started this process: reports to it, and answers to its signals."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

from dlac_pipeline.elastic.ranks.rank import ENDING_SIGNALS
from dlac_pipeline.lakehouse.masking import mask_event
from dlac_pipeline.lakehouse.plain_json import strict_json

MARGIN_S = 5.0
"""Extra seconds for a launcher, past the ranks' grace period, when it is not needed any more."""
_EVENTS: list[TextIO] = []
"""The last one is the stream of events. None: `sys.stdout`."""
_REPORTING = threading.Lock()


def keep_events_apart() -> None:
    """Leave standard output to events from now on. Other output, of libraries and users' transforms, goes to standard error."""
    _EVENTS.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # printed text is written at once, whichever way the process ends


def report(event: dict[str, Any]) -> None:
    """Report an event as one line of JSON. Thread-safe."""
    try:
        with _REPORTING:
            stream = _EVENTS[-1] if _EVENTS else sys.stdout
            stream.write(mask_event(strict_json(event)) + "\n")  # in one piece: on Slurm the nodes share a file
            stream.flush()
    except BrokenPipeError:  # no reader is left, which the end of standard input shows as well
        _EVENTS.append(open(os.devnull, "w"))  # noqa: SIM115 - stays open until the process ends


def on_signals(numbers: Iterable[signal.Signals], answer: Callable[[], None]) -> None:
    """Make a thread of this process call `answer` at each of these signals, once for several that arrive together.

    A handler interrupts the main thread, which may wait for the event that the answer sets and hold the lock of that event. A
    handler that took the lock would wait for itself. So it only writes a byte, which needs no lock.
    """
    read_end, write_end = os.pipe()  # no child process inherits them
    os.set_blocking(write_end, False)

    def answer_all() -> None:
        while os.read(read_end, 4096):
            answer()

    def note(*_: object) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the thread will answer
            os.write(write_end, b"\0")

    threading.Thread(target=answer_all, name="signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, note)


def on_ending_signals(leave: Callable[[], None]) -> None:
    """Make this process, a launcher, call `leave` at each signal that ends a launch, except one that `nohup` ignores."""
    on_signals([number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], leave)
