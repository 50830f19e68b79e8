"""OpenTelemetry: recoveries and their phases as spans, and gauges of progress, over OTLP."""

import os
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.spec.job_spec import JobSpec

_SCOPE = "dlac"
_EXPORT_EVERY_MS = "10000"
"""Milliseconds between two exports of gauges. OpenTelemetry's own default is a minute, longer than many recoveries."""
_UNITS = {"step": "{step}", "loss_step": "{step}", "loss": "1", "rows_at_risk": "{row}"}
_UNITS |= {"rows_per_s": "{row}/s", "tokens_per_s": "{token}/s"}


class OpenTelemetryListener:
    """Exporter of spans and gauges."""

    def __init__(self, spec: JobSpec) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "dlac")
        os.environ.setdefault("OTEL_METRIC_EXPORT_INTERVAL", _EXPORT_EVERY_MS)
        resource = Resource.create({"dlac.run": spec.run})
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._metrics = MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer(_SCOPE)
        meter = self._metrics.get_meter(_SCOPE)
        self._gauges = {name: meter.create_gauge(f"dlac.{name}", unit=unit) for name, unit in _UNITS.items()}

    def on_event(self, event: events.RunEvent) -> None:
        """Set the gauges that an event has, or record its spans."""
        if isinstance(event, events.AttemptStarted | events.ProgressMade | events.CheckpointCommitted):
            for name, value in event.gauges().items():
                self._gauges[name].set(value, {"dlac.attempt": event.attempt})
        elif isinstance(event, events.RecoveryEnded):
            self._record(event)
        elif isinstance(event, events.WentBack):
            facts = {name: getattr(event, name) for name in ("cause", "reason", "branch", "step", "left_step")}
            self._mark("went_back", event, {**facts, "abandoned": [each.checkpoint_id for each in event.abandoned]})
        elif isinstance(event, events.CheckpointsRetired):
            self._mark("retired", event, {"checkpoints": [each.checkpoint_id for each in event.checkpoints]})
        elif isinstance(event, events.RunBegun):
            self._mark("begun", event, {name: getattr(event, name) for name in ("parent_run", "origin", "origin_step")})

    def close(self) -> None:
        """Export the rest."""
        self._traces.shutdown()
        self._metrics.shutdown()

    def _mark(self, name: str, event: events.RunEvent, facts: Mapping[str, AttributeValue]) -> None:
        """Record a moment as a span without a length."""
        attributes = {f"dlac.{key}": value for key, value in {"attempt": event.attempt, **facts}.items()}
        moment = _ns(event.at)
        self._tracer.start_span(f"dlac.{name}", start_time=moment, attributes=attributes).end(moment)

    def _record(self, event: events.RecoveryEnded) -> None:
        """Record a recovery as a span, and each phase that took any time as a span below it."""
        first, last = event.phases[0], event.phases[-1]
        attributes: dict[str, str | int] = {
            "dlac.attempt": event.attempt,
            "dlac.cause": event.cause,
            "dlac.outcome": event.outcome,
            "dlac.noticed_by": event.noticed_by,
            "dlac.rows_replayed": event.rows_replayed,
        }
        span = self._tracer.start_span("dlac.recovery", start_time=_ns(first.start), attributes=attributes)
        if event.outcome != "resumed":
            span.set_status(Status(StatusCode.ERROR, event.outcome))
        for phase in event.phases:
            if phase.end > phase.start:
                below = set_span_in_context(span)
                name = f"dlac.recovery.{phase.name}"
                self._tracer.start_span(name, context=below, start_time=_ns(phase.start)).end(_ns(phase.end))
        span.end(_ns(last.end))


def _ns(moment: float) -> int:
    return int(moment * 1e9)
