"""The process of a run's listeners: `python -m dlac_pipeline.integrations.listeners.main`.

Standard input: the job spec and the orchestrator's run as one line of JSON, then one event per line. The process ends with its
standard input. Logs go to standard error.
"""

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from dlac_pipeline.integrations.listeners.events import Listener
from dlac_pipeline.integrations.listeners.subscription import Subscription
from dlac_pipeline.integrations.listeners.translate import EventTranslator
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.listeners_spec import GROUP

_POLL_S = 0.5
"""Seconds between two reads of the heartbeats."""
_OWN = {
    "openlineage": ("open_lineage", "OpenLineageListener"),
    "mlflow": ("ml_flow", "MLflowListener"),
    "wandb": ("weights_and_biases", "WandbListener"),
    "opentelemetry": ("open_telemetry", "OpenTelemetryListener"),
    "prometheus": ("prometheus", "PrometheusListener"),
}
"""Listener -> module of this package, and class. Names differ from those of the libraries."""


def main() -> int:
    """Pass events to listeners until standard input ends. Return the exit status."""
    # A scheduler signals every process of a job, and the last events are still to come.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    lines = _lines()
    head = json.loads(next(line for line in lines if line is not None))
    spec = parse_spec(head["spec"], origin="the job spec of the listeners")
    translator = EventTranslator(spec, parent_run=head["launched_by"])
    subscriptions = [
        Subscription(name, _maker(name, options, spec), most_waiting=spec.listeners.queue_events)
        for name, options in spec.listeners.chosen().items()
    ]
    for line in lines:
        for event in translator.poll() if line is None else translator.translate(json.loads(line)):
            for each in subscriptions:
                each.put(event)
    for event in translator.end("lost", reason="the supervisor was lost"):
        for each in subscriptions:
            each.put(event)
    _close(subscriptions, within_s=spec.listeners.end_s)
    return 0


def _close(subscriptions: list[Subscription], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for each in subscriptions:
        each.close()
    for each in subscriptions:
        each.join(deadline)


def _lines() -> Iterator[bytes | None]:
    """Yield each line of standard input, and None whenever none has arrived for a while."""
    rest = b""
    while True:
        if not select.select([0], [], [], _POLL_S)[0]:
            yield None
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _maker(name: str, options: Mapping[str, Any], spec: JobSpec) -> Callable[[], Listener]:
    """Return a function that imports and makes a listener."""

    def make() -> Listener:
        if name in _OWN:
            module, kind = _OWN[name]
            own = import_module(f"dlac_pipeline.integrations.listeners.{module}")
            made: Listener = getattr(own, kind)(getattr(spec.listeners, name), spec)
            return made
        (point,) = entry_points(group=GROUP, name=name)
        other: Listener = point.load()(**options)
        return other

    return make


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # exit handlers and threads of libraries may hang
