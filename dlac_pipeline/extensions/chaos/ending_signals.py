"""Signals that end the command. Only the first one counts, and none interrupts the end of an outage."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> None:
    """Raise `SystemExit` at the first Ctrl-C, SIGTERM or SIGHUP, and ignore later ones. A signal that is ignored stays so."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, _end)


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Hold these signals back within the context. Yields the received ones. The first one takes effect afterwards."""
    received: list[int] = []
    before = {number: handler for number in _ENDING if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda signalled, _: received.append(signalled))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _end(number: int, _: FrameType | None) -> NoReturn:
    for each in _ENDING:  # no SIG_IGN, or Python complains about one that it has received already
        signal.signal(each, lambda *_: None)
    sys.exit(128 + number)
