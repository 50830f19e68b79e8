"""Resources of the assets: the job to run, and the lakehouse of the corpus. The launchpad shows a field per setting of a job."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, get_args, get_origin

import dagster as dg
from pydantic import BaseModel, Field, PrivateAttr, create_model

from dlac_pipeline.dagster.heartbeat import Heartbeat
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.spec.job_spec import JobSpec, home_folder, parse_spec

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse


def dagster_config(model: type[BaseModel]) -> type[dg.Config]:
    """Return a Dagster config class with the fields, defaults and descriptions of a pydantic model and its parts.

    Dagster checks names, types and choices. The model's own validators run when the spec is built from the configuration.
    """
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        optional = (
            [each for each in get_args(annotation) if _is_model(each)] if type(None) in get_args(annotation) else []
        )
        described: dict[str, Any] = {"description": field.description}
        if optional:
            annotation, described["default"] = dagster_config(optional[0]) | None, None
        elif _is_model(annotation):
            annotation = dagster_config(annotation)
            if not field.is_required():
                described["default_factory"] = annotation
        elif get_origin(annotation) is list and _is_model(get_args(annotation)[0]):
            annotation = list[dagster_config(get_args(annotation)[0])]  # type: ignore[misc]  # made at run time
            described["default"] = []
        elif not field.is_required():
            described["default"] = field.get_default(call_default_factory=True)
        fields[name] = (annotation, Field(**described))
    config: type[dg.Config] = create_model(f"{model.__name__}Config", __base__=dg.Config, **fields)
    return config


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


JobSpecConfig = dagster_config(JobSpec)


class Job(Protocol):
    """A training run, for the step of a Dagster run."""

    def job_spec(self) -> JobSpec:
        """Return the resolved spec. Raises SpecInvalid."""

    def lakehouse(self) -> "Lakehouse":
        """Return its open lakehouse."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DefinedJob:
    """Training run whose job spec a code location defines."""

    read_spec: Callable[[Mapping[str, Any]], JobSpec]
    """Returns the resolved spec, given settings that override it."""
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def job_spec(self) -> JobSpec:
        """Return the resolved spec. Raises SpecInvalid."""
        return self.read_spec(self.overrides)

    def lakehouse(self) -> "Lakehouse":
        """Return its open lakehouse."""
        from dlac_pipeline.lakehouse.iceberg.connect import connect

        return connect(self.job_spec().lakehouse)


HEARTBEAT = "dlac_heartbeat"
"""Key of the resource that the assets of training runs share."""


@dg.resource(description="Heartbeat of the process of a Dagster run that trains.")
def heartbeat_resource(context: dg.InitResourceContext) -> Iterator[Heartbeat]:
    """Yield the heartbeat while the Dagster run uses the resource."""
    assert context.instance is not None
    assert context.run_id is not None
    with closing(Heartbeat(context.instance, context.run_id)) as heartbeat:
        yield heartbeat


class JobResource(dg.ConfigurableResource[Any]):
    """The training run that a Dagster run is about."""

    spec: JobSpecConfig  # type: ignore[valid-type]  # made from the job spec at import
    _heartbeat: Heartbeat | None = PrivateAttr(default=None)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Self]:
        """Yield this resource, with a heartbeat while the Dagster run uses it."""
        if context.run_id is None or context.instance is None:
            yield self
            return
        with closing(Heartbeat(context.instance, context.run_id)) as self._heartbeat:
            yield self

    def was_interrupted(self) -> None:
        """Note that the process of the Dagster run has been interrupted. The heartbeat does not interrupt it again."""
        if self._heartbeat is not None:
            self._heartbeat.was_interrupted()

    def job_spec(self) -> JobSpec:
        """The validated spec, with the embedded lakehouse of $DLAC_HOME where none is named. Raises as `parse_spec`."""
        spec = parse_spec(self.spec.model_dump(), origin="the run configuration")  # type: ignore[attr-defined]
        script = str(Path(spec.launch.script).resolve())
        launch = spec.launch.model_copy(update={"script": script})
        return spec.model_copy(update={"launch": launch}).resolved(home_folder())

    def lakehouse(self) -> "Lakehouse":
        """The open lakehouse of this run."""
        from dlac_pipeline.lakehouse.iceberg.connect import connect

        return connect(self.job_spec().lakehouse)


class LakehouseResource(dg.ConfigurableResource[Any]):
    """The embedded lakehouse of $DLAC_HOME, or the one that is named, as in a job spec."""

    type: str = ""
    uri: str = ""
    warehouse: str = ""
    name: str | None = None
    namespace: str = "dlac"
    properties: dict[str, str] = Field(default_factory=dict)

    def lakehouse(self) -> "Lakehouse":
        """The open lakehouse."""
        from dlac_pipeline.lakehouse.iceberg.connect import connect

        given = {name: getattr(self, name) for name in LakehouseConfig.model_fields}
        return connect(LakehouseConfig.model_validate(given).at_home(home_folder()))
