"""Signals to a launcher, which a thread of its process answers."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from dlac_pipeline.elastic.ranks.rank import ENDING_SIGNALS


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
