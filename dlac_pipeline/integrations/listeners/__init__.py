"""Listeners of a run: OpenLineage, MLflow, Weights & Biases, OpenTelemetry, Prometheus, and those of other distributions.

A listener is an object with a method `on_event(event)`, and perhaps `close()`. An entry point of the group `dlac.listeners` names
a function or class that returns it, and gets the options of the spec's table [listeners.NAME] as keyword arguments.
"""

from dlac_pipeline.integrations.listeners.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Listener,
    ProgressMade,
    RecoveryEnded,
    RecoveryPhase,
    RowsQuarantined,
    RunEvent,
    SourceTable,
)

__all__ = [
    "AttemptEnded",
    "AttemptStarted",
    "CheckpointCommitted",
    "Listener",
    "ProgressMade",
    "RecoveryEnded",
    "RecoveryPhase",
    "RowsQuarantined",
    "RunEvent",
    "SourceTable",
]
