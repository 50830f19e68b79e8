"""Listeners section of a job spec: receivers of a run's events, each with a table of options.

No option is a secret. Each library reads its own environment variables, so that copies of the spec contain no credentials.
"""

from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.masking import is_secret_name, mask_secrets
from dlac_pipeline.spec.sections import EventReceiver, ExtensionSection
from dlac_pipeline.spec.spec_problems import Section, Wait

LISTENERS = Door("dlac.listeners", "listener")
_PROGRAM = "dlac_pipeline.extensions.listeners.main"
ENDPOINTS = ("prometheus",)
"""Listeners that are asked during a launch. A command has ended before anyone asks, so they receive none of its events."""


class OpenLineageSpec(Section):
    """OpenLineage. Its client reads the address from OPENLINEAGE_URL and OPENLINEAGE_API_KEY, or from openlineage.yml."""

    namespace: str = Field(default="dlac", min_length=1)
    """Namespace of the job, whose name is that of the run."""


class MLflowSpec(Section):
    """MLflow. Its client reads credentials from MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN."""

    tracking_uri: str = ""
    """Address of the tracking server, without credentials. Empty: MLFLOW_TRACKING_URI."""
    experiment: str = Field(default="dlac", min_length=1)
    """Experiment, which is made if it does not exist."""


class WandbSpec(Section):
    """Weights & Biases. Its client reads WANDB_API_KEY, WANDB_BASE_URL, WANDB_DIR, WANDB_ENTITY and WANDB_MODE."""

    project: str = Field(default="dlac", min_length=1)
    """Project of the run."""


class OpenTelemetrySpec(Section):
    """OpenTelemetry. Its exporters read OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_METRIC_EXPORT_INTERVAL and more."""


class PrometheusSpec(Section):
    """Prometheus: a text endpoint at /metrics on the node of the supervisor that leads."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen at. The default is reachable from this node only."""
    port: int = Field(default=9464, ge=1024, le=65_535)
    """Port to listen at."""


class ListenersSpec(ExtensionSection):
    """Receivers of the run's events: OpenLineage, MLflow, Weights & Biases, OpenTelemetry, Prometheus, or your own."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "object"}})

    openlineage: OpenLineageSpec | None = None
    """Lineage of each attempt, to an OpenLineage endpoint."""
    mlflow: MLflowSpec | None = None
    """Metrics, inputs and checkpoint tags, to an MLflow run."""
    wandb: WandbSpec | None = None
    """Metrics, inputs and checkpoints, to a run of Weights & Biases."""
    opentelemetry: OpenTelemetrySpec | None = None
    """Recoveries as spans, and gauges, to an OTLP endpoint."""
    prometheus: PrometheusSpec | None = None
    """Gauges and counters, as an endpoint for Prometheus."""
    other: dict[str, Any] = Field(default_factory=dict)
    """Listeners of other distributions by their names in the entry point group dlac.listeners, with a table of options each.
    [listeners.NAME] is short for [listeners.other.NAME]."""
    end_s: Wait = 5.0
    """Seconds that the end of a launch waits for listeners."""

    @model_validator(mode="before")
    @classmethod
    def _take_other_names(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or not isinstance(raw.get("other", {}), dict):
            return raw
        short = {name: table for name, table in raw.items() if name not in cls.model_fields and isinstance(table, dict)}
        rest = {name: value for name, value in raw.items() if name not in short}
        return {**rest, "other": {**rest.get("other", {}), **short}} if short else rest

    @field_validator("other")
    @classmethod
    def _have_tables(cls, other: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(other.keys() & cls.model_fields.keys()):
            raise ValueError(
                f"expected a listener of another distribution, found {own[0]!r}: write [listeners.{own[0]}]"
            )
        wrong = [name for name, options in other.items() if not isinstance(options, dict)]
        if wrong:
            raise ValueError(f"expected a table of options for {wrong[0]!r}, found {type(other[wrong[0]]).__name__}")
        return other

    @model_validator(mode="after")
    def _has_no_secret(self) -> "ListenersSpec":
        for name, options in self.chosen().items():
            for option, value in options.items():
                if is_secret_name(option) or mask_secrets(str(value)) != str(value):
                    raise ValueError(
                        f"expected no secret, found one in {name}.{option}: remove it, and set the environment variable of "
                        f"{name} in its place"
                    )
        return self

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Return the name of each listener -> its options."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: each.model_dump() for name, each in fields.items() if isinstance(each, Section)} | self.other

    def check_here(self) -> None:
        """Raise `BadInput` for a chosen listener that is unknown, or whose package is not installed. Imports none of them."""
        for name in self.chosen():
            LISTENERS.check(name, setting=f"[listeners.{name}]")

    @property
    def event_receiver(self) -> EventReceiver | None:
        """The process of the chosen listeners."""
        chosen = self.chosen()
        takes_commands = bool(chosen.keys() - set(ENDPOINTS))
        return EventReceiver(module=_PROGRAM, end_s=self.end_s, takes_commands=takes_commands) if chosen else None
