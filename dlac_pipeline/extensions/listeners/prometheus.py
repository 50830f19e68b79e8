"""Prometheus: gauges and counters of a run, as text over HTTP."""

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.spec.job_spec import JobSpec

_GAUGES = {
    "attempt": "Number of the current attempt",
    "branch": "Number of the run's branch: 1, and one more each time that the run went back",
    "world_size": "Ranks of the current attempt",
    "step": "Last optimizer step that all ranks have finished",
    "loss_step": "Step of the loss, which is known later than the step is finished",
    "loss": "Mean loss over the global batch of that step",
    "rows_at_risk": "Rows of finished steps that no committed checkpoint has",
    "rows_per_s": "Rows per second",
    "tokens_per_s": "Tokens per second",
    "checkpoint_step": "Step of the last committed checkpoint",
    "checkpoint_duration_s": "Seconds of the last checkpoint",
    "recovery_s": "Seconds of the last recovery",
}
_COUNTERS = {
    "checkpoints": ("Committed checkpoints", ()),
    "rows_committed": ("Rows of committed checkpoints", ("table",)),
    "recoveries": ("Recoveries", ("outcome",)),
    "quarantines": ("Decisions to leave out rows", ()),
}


class PrometheusListener:
    """Endpoint for Prometheus. Values are those of this launch."""

    def __init__(self, spec: JobSpec, *, host: str, port: int) -> None:
        self._run = spec.run
        registry = CollectorRegistry()
        self._gauges = {name: Gauge(f"dlac_{name}", text, ["run"], registry=registry) for name, text in _GAUGES.items()}
        self._counters = {
            name: Counter(f"dlac_{name}", text, ["run", *labels], registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    def on_event(self, event: events.RunEvent) -> None:
        """Change the values that an event has."""
        if isinstance(event, events.AttemptStarted):
            self._clear("loss_step", "loss", "rows_per_s", "tokens_per_s")
            self._set(attempt=event.attempt, branch=event.branch, world_size=event.world_size, **event.gauges())
        elif isinstance(event, events.ProgressMade):
            self._set(**event.gauges())
        elif isinstance(event, events.CheckpointCommitted):
            self._set(checkpoint_step=event.step, checkpoint_duration_s=event.duration_s, **event.gauges())
            self._counters["checkpoints"].labels(self._run).inc()
            for table, rows in event.rows_by_table.items():
                self._counters["rows_committed"].labels(self._run, table).inc(rows)
        elif isinstance(event, events.RecoveryEnded):
            self._set(recovery_s=event.phases[-1].end - event.phases[0].start)
            self._counters["recoveries"].labels(self._run, event.outcome).inc()
        elif isinstance(event, events.RowsQuarantined):
            self._counters["quarantines"].labels(self._run).inc()
        elif isinstance(event, events.WentBack):
            self._set(branch=event.branch, checkpoint_step=event.step)

    def close(self) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()

    def _clear(self, *names: str) -> None:
        """Remove the values of an attempt before."""
        for name in names:
            with suppress(KeyError):
                self._gauges[name].remove(self._run)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].labels(self._run).set(value)
