"""A launcher's main thread that always waits for an event that signals set. It prints how many signals it handled."""

import signal
import threading

from dlac_pipeline.launchers.signals import on_ending_signals, on_signals

heard, done = threading.Event(), threading.Event()
on_ending_signals(heard.set)
on_signals((signal.SIGUSR2,), done.set)
with heard._cond:  # type: ignore[attr-defined]  # the event itself holds it at the start of every wait
    signal.raise_signal(signal.SIGTERM)
assert heard.wait(60)
print("ready", flush=True)
while not done.is_set():
    heard.wait(1e-6)
    heard.clear()
print("done", flush=True)
