"""Listeners section of a job spec: receivers of a run's events, each with a table of options.

No option is a secret. Each library reads its own environment variables, so that copies of the spec contain no credentials.
"""

import ast
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, model_validator

from dlac_pipeline.lakehouse.doors import Door, install_command
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.lakehouse.masking import is_secret_name, mask_secrets
from dlac_pipeline.spec.sections import EventReceiver, ExtensionSection
from dlac_pipeline.spec.spec_problems import Section

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec

LISTENERS = Door("dlac.listeners", "listener")
ENDPOINTS = ("prometheus",)
"""Listeners that are asked during a launch. A command has ended before anyone asks, so they receive none of its events."""


class OpenLineageSpec(Section):
    """OpenLineage. Its client reads the address from OPENLINEAGE_URL and OPENLINEAGE_API_KEY, or from openlineage.yml."""

    namespace: str = Field(default="dlac", min_length=1)
    """Namespace of the job, whose name is that of the run."""


class MLflowSpec(Section):
    """MLflow. Its client reads MLFLOW_TRACKING_URI, and MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN."""

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
    """Receivers of the run's events: OpenLineage, MLflow, W&B, OpenTelemetry, Prometheus, or another entry of dlac.listeners."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": {"type": "object"}})

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

    @model_validator(mode="after")
    def _have_tables(self) -> "ListenersSpec":
        for name, options in self._others.items():
            if not isinstance(options, dict):
                raise ValueError(f"expected a table of options for {name!r}, found {type(options).__name__}")
        return self

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
        return {name: each.model_dump() for name, each in fields.items() if isinstance(each, Section)} | self._others

    @property
    def _others(self) -> dict[str, Any]:
        """The tables of listeners of other distributions."""
        return dict(self.model_extra or {})

    def check_here(self) -> None:
        """Raise `BadInput` for a chosen listener that is unknown, or whose package is not installed. Imports none of them."""
        for name in self.chosen():
            setting = f"[listeners.{name}]"
            point = LISTENERS.find(name, setting=setting)
            if missing := _missing_package(point.module):
                raise BadInput(f"expected the package {missing} for {setting}, found none: {install_command(point)}")

    def event_receiver(
        self, spec: "JobSpec", *, launched_by: str = "", is_command: bool = False
    ) -> EventReceiver | None:
        """Return the process of the chosen listeners."""
        from dlac_pipeline.extensions.listeners.process import ListenerProcess

        chosen = self.chosen().keys() - set(ENDPOINTS if is_command else ())
        return ListenerProcess(spec, launched_by=launched_by, is_command=is_command) if chosen else None


def _missing_package(module: str) -> str:
    """Return the first module that `module` imports at its top and that is not installed. Empty: all are."""
    found = None
    with suppress(ModuleNotFoundError):
        found = find_spec(module)
    if found is None:
        return module
    source = found.loader.get_source(module) if isinstance(found.loader, InspectLoader) else None
    for statement in ast.parse(source or "").body:
        names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module]
        for name in names:
            if not _is_installed(name):
                return name
    return ""


def _is_installed(module: str) -> bool:
    """Return whether a module's outermost package with code can be found. A package without code is imported for it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        found = find_spec(".".join(parts[:end]))
        if found is None or found.origin is not None:
            return found is not None
    return True
