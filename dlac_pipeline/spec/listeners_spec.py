"""Listeners section of a job spec: receivers of a run's events, each with a table of options.

No option is a secret. Each library reads its own environment variables, so that copies of the spec contain no credentials.
"""

from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.lakehouse.masking import is_secret_name, mask_secrets
from dlac_pipeline.spec.spec_problems import Section, Wait

GROUP = "dlac.listeners"
"""Entry point group of listeners that other distributions have."""
_PACKAGES = {
    "openlineage": ("openlineage.client",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "opentelemetry": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "prometheus": ("prometheus_client",),
}
"""Listener -> packages that it needs."""


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
    """Weights & Biases. Its client reads WANDB_API_KEY, WANDB_BASE_URL and WANDB_DIR."""

    project: str = Field(default="dlac", min_length=1)
    """Project of the run."""
    entity: str = ""
    """User or team. Empty: WANDB_ENTITY, or the user of the key."""
    mode: Literal["", "online", "offline"] = ""
    """"offline": write files only, for `wandb sync`. Empty: WANDB_MODE, or online."""


class OpenTelemetrySpec(Section):
    """OpenTelemetry. Its exporters read OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES."""

    export_every_s: float = Field(default=10.0, ge=0.1, le=86_400)
    """Seconds between two exports of gauges."""


class PrometheusSpec(Section):
    """Prometheus: a text endpoint at /metrics on the node of the supervisor that leads."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen at. The default is reachable from this node only."""
    port: int = Field(default=9464, ge=1024, le=65_535)
    """Port to listen at."""


class ListenersSpec(Section):
    """Listeners of the run's events. A table [listeners.NAME] adds one."""

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
    queue_events: int = Field(default=1000, ge=1, le=1_000_000)
    """Events that wait for a slow listener. With more, the oldest progress events are dropped. Others are kept."""
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
        if own := sorted(other.keys() & _PACKAGES.keys()):
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
        own = {name: getattr(self, name) for name in _PACKAGES}
        return {name: each.model_dump() for name, each in own.items() if each is not None} | self.other


def check_listeners(listeners: ListenersSpec) -> None:
    """Raise `SpecInvalid` for a chosen listener that is unknown, or `BadInput` if a package that it needs is not installed."""
    others = {point.name: point for point in entry_points(group=GROUP)} if listeners.other else {}
    for name in listeners.chosen():
        if name not in _PACKAGES and name not in others:
            known = [*_PACKAGES, *others]
            close = get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"one of {known!r}"
            raise SpecInvalid(
                f"expected listeners that are installed, found [listeners.{name}]: {meant} A listener of your own needs an entry "
                f"point {name!r} in the group {GROUP!r}"
            )
        for package in _PACKAGES.get(name) or (others[name].module,):
            with suppress(ModuleNotFoundError):  # of a parent package
                if find_spec(package) is not None:
                    continue
            install = "" if name in others else ': pip install "dlac-pipeline[listeners]"'
            raise BadInput(f"expected the package {package} for [listeners.{name}], found none{install}")
