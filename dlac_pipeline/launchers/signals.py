"""Signals to a launcher: each is answered by a thread, as its handler runs in the midst of whatever the main thread does.

That may be waiting for the very event that the answer sets: what an event is guarded by is held for a moment then, and a handler
that wanted it would wait for itself. So a handler only writes a byte, which takes nothing that anybody holds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from dlac_pipeline.elastic.ranks.rank import ENDING_SIGNALS


def on_signals(numbers: Iterable[signal.Signals], answer: Callable[[], None]) -> None:
    """Make a thread of this process call `answer` at each of these signals, once for several that arrive together."""
    heard, told = os.pipe()  # no process that is started from here has them
    os.set_blocking(told, False)

    def hear() -> None:
        while os.read(heard, 4096):
            answer()

    def tell(*_: object) -> None:
        with suppress(BlockingIOError):  # so many are on their way already
            os.write(told, b"\0")

    threading.Thread(target=hear, name="signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, tell)


def on_ending_signals(leave: Callable[[], None]) -> None:
    """Make this process, a launcher, call `leave` at each signal that ends a launch, except one that `nohup` ignores."""
    on_signals([number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], leave)
