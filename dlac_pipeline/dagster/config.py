"""The job spec as Dagster configuration: the launchpad shows one field per setting of dlac_pipeline/spec/job_spec.py."""

import typing
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field, create_model

from dlac_pipeline.spec.job_spec import JobSpec


def dagster_config(model: type[BaseModel]) -> type[dg.Config]:
    """Return a Dagster config class with the fields, defaults and descriptions of a pydantic model and its parts.

    Dagster checks names, types and choices. The model's own validators run when the spec is built from the configuration.
    """
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        described: dict[str, Any] = {"description": field.description}
        if _is_model(annotation):
            annotation = dagster_config(annotation)
            if not field.is_required():
                described["default_factory"] = annotation
        elif typing.get_origin(annotation) is list and _is_model(typing.get_args(annotation)[0]):
            annotation = list[dagster_config(typing.get_args(annotation)[0])]  # type: ignore[misc]  # made at run time
            described["default"] = []
        elif not field.is_required():
            described["default"] = field.get_default(call_default_factory=True)
        fields[name] = (annotation, Field(**described))
    config: type[dg.Config] = create_model(f"{model.__name__}Config", __base__=dg.Config, **fields)
    return config


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


JobSpecConfig = dagster_config(JobSpec)
