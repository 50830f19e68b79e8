"""What is wrong with a job spec, in words: by field, what was expected and what was found."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from difflib import get_close_matches

from pydantic import BaseModel
from pydantic_core import ErrorDetails


def problem_said(problem: ErrorDetails, root: type[BaseModel]) -> str:
    """What was expected and what was found; of sections and lists their type only."""
    value = problem["input"]
    found = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    if problem["type"] == "value_error":  # a validator above, which names what it found
        return str(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return problem["msg"]
    if problem["type"] == "extra_forbidden":
        return f"{_instead(problem['loc'], root)} (found {found})"
    return f"{problem['msg']} (found {found})"


def _instead(path: Sequence[str | int], root: type[BaseModel]) -> str:
    """What the unknown field at `path` was probably meant to be."""
    section = root
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[str(part)].annotation
        if typing.get_origin(annotation) is list:
            (annotation,) = typing.get_args(annotation)
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    known = list(section.model_fields)
    close = get_close_matches(str(path[-1]), known, n=1)
    return f"unknown field, did you mean {close[0]!r}?" if close else f"unknown field, expected one of {known!r}"
