"""A launcher's main thread that waits all the time for what signals set; tells on standard output how many were heard."""

import signal
import threading

from dlac_pipeline.launchers.signals import on_ending_signals, on_signals

heard, done = threading.Event(), threading.Event()
on_ending_signals(heard.set)
on_signals((signal.SIGUSR2,), done.set)
with heard._cond:  # type: ignore[attr-defined]  # as the event itself does for a moment whenever it is waited for
    signal.raise_signal(signal.SIGTERM)
assert heard.wait(60)
print("ready", flush=True)
while not done.is_set():
    heard.wait(1e-6)
    heard.clear()
print("done", flush=True)
