"""Problems of a job spec in words: by field, expected and found. And the base class of its sections.

Every number of a section has a least and a greatest value. Without them a library would fail late on a number of another kind
(inf, nan, true) or beyond them: after the run was claimed, or not at all.
"""

import typing
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic.functional_validators import AfterValidator, BeforeValidator
from pydantic_core import ErrorDetails

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.lakehouse.masking import is_secret_name, mask_secrets
from dlac_pipeline.spec.bounds import LONGEST_WAIT_S

_WITH_SECRETS = ("lakehouse", "checkpoint", "launch", "params")
"""Sections of the core in which an unknown field may be a misplaced secret. It may be one in each section of an extension."""
_NOT_A_SECTION = ("model_type", "model_attributes_type", "dict_type", "list_type")
"""Problems of a value in the place of a section, of free settings or of a list."""
_DATA = ("row_filter", "exclude", "params")
"""Settings whose text is compared with data, or read by the script. NUL may be part of it."""
_SPACES = ("begin_token", "end_token", "row_filter")
"""Settings that may be spaces, or say more about them."""
Wait = Annotated[float, Ge(0), Le(LONGEST_WAIT_S)]
Timeout = Annotated[float, Gt(0), Le(LONGEST_WAIT_S)]
"""Seconds after which something counts as failed."""


class Section(BaseModel):
    """A section of settings, with finite numbers and no unknown field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    @classmethod
    def known_fields(cls) -> dict[str, FieldInfo]:
        """Return all fields by name, for messages."""
        return cls.model_fields

    @field_validator("*", mode="before")
    @classmethod
    def _is_filled(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value.isspace() and info.field_name not in _SPACES:
            raise ValueError(f"expected a value, found the blank {value!r}: fill it in, or leave the setting out")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _finite(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        wrong = [each for each in (value if isinstance(value, list) else [value]) if not _fits(each)]
        if wrong and holds_numbers(field):
            words = {Ge: "of at least", Gt: "above", Le: "of at most", Lt: "below"}
            bounds = " and ".join(f"{words[kind]} {bound}" for kind, bound in bounds_of(field).items())
            raise ValueError(f"expected a number{bounds and f' {bounds}'}, found {wrong[0]!r}")
        return value


def name_or_number(least: int, most: int, names: tuple[str, ...] = ()) -> BeforeValidator:
    """Return a check of a setting that is a whole number between `least` and `most`, or a name: any, or one of `names`."""
    wanted = " or ".join(f'"{name}"' for name in names) or "a name"

    def check(value: object) -> object:
        if isinstance(value, str):
            fits = value in names or not names
        else:
            fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if not fits:
            raise ValueError(f"expected {wanted}, or a number from {least} to {most}, found {value!r}")
        return value

    return BeforeValidator(check)


def name_in(door: Door, setting: str, *own: str) -> AfterValidator:
    """Return a check of a setting that names an entry of a door, or one of the core's `own`."""

    def check(name: str) -> str:
        try:
            if name not in own:
                door.find(name, setting=setting, others=own)
        except BadInput as err:
            raise ValueError(str(err)) from err
        return name

    return AfterValidator(check)


def holds_numbers(field: FieldInfo) -> bool:
    """Return whether a field takes a number, or a list of numbers, and no text."""
    kinds = set(_kinds_of(field.annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, str}


def bounds_of(field: FieldInfo) -> dict[type, float]:
    """Return the bounds of a field's numbers: the kind of bound (`Ge`, `Gt`, `Le` or `Lt`) -> its value."""
    found = list(field.metadata)
    if typing.get_origin(field.annotation) is list:
        of_items = getattr(typing.get_args(field.annotation)[0], "__metadata__", ())
        found += [bound for each in of_items for bound in getattr(each, "metadata", ())]
    return {
        type(each): getattr(each, type(each).__name__.lower()) for each in found if isinstance(each, Ge | Gt | Le | Lt)
    }


def _fits(value: object) -> bool:
    """Return True if a value is no number at all, or one that fits into 64 bits. true and false are neither."""
    if isinstance(value, bool):
        return False
    try:
        return not isinstance(value, int | float | str) or abs(float(value)) <= 2**63
    except OverflowError:
        return False
    except ValueError:
        return True  # a text that is no number: its type is the problem


def _kinds_of(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (typing.Union, UnionType, list, typing.Annotated):
        for each in typing.get_args(annotation):
            yield from _kinds_of(each)
    else:
        yield annotation


_SectionT = typing.TypeVar("_SectionT", bound=Section)


def _fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return model.known_fields() if issubclass(model, Section) else model.model_fields


def validate(section: type[_SectionT], raw: object, *, invalid: str) -> _SectionT:
    """Return a section from plain data, or raise `SpecInvalid` with every wrong field, what was expected and found.

    `invalid` begins the error, such as "'job.toml' is not a valid job spec".
    """
    if with_nul := list(_places_of_nul(raw)):
        places = ", ".join(describe_place(path, section) for path in with_nul)
        raise SpecInvalid(f"{invalid}:\n  {places}: expected text without NUL, found NUL in it: remove it")
    try:
        return section.model_validate(raw)
    except ValidationError as err:
        found = [(describe_place(each["loc"], section), describe_problem(each, section)) for each in err.errors()]
        raise SpecInvalid(f"{invalid}:\n" + "\n".join(f"  {place}: {text}" for place, text in found)) from err


def _places_of_nul(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each text with NUL, which no file, process or database can be named with."""
    if isinstance(value, str) and "\0" in value:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        if isinstance(name, str) and "\0" in name:
            yield path
        elif name not in _DATA:
            yield from _places_of_nul(each, (*path, name))


def describe_place(path: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the place of a problem. In a table of free settings, a key that is no name may be a secret."""
    free = _free_from(path, root)
    parts = [
        f"<{type(part).__name__}>" if at >= free and not isinstance(part, str) else str(part)
        for at, part in enumerate(path)
    ]
    return mask_secrets(".".join(parts)) or "spec"


def describe_problem(problem: ErrorDetails, root: type[BaseModel]) -> str:
    """Return expected and found values. Of sections, lists and possible secrets, the type only."""
    if problem["type"] == "value_error":  # a validator above, which names what it found
        return mask_secrets(str(problem["ctx"]["error"]))
    if problem["type"] == "missing":
        return problem["msg"]
    found = _describe_found(problem, root)
    if problem["type"] == "extra_forbidden":
        return f"{_instead(problem['loc'], root)} (found {found})"
    return f"{problem['msg']} (found {found})"


def _describe_found(problem: ErrorDetails, root: type[BaseModel]) -> str:
    """Return the value, or its type: free settings and values of unknown fields may be secrets."""
    value, path = problem["input"], problem["loc"]
    may_have_secrets = path[0] in _WITH_SECRETS or (len(path) > 1 and path[0] not in root.model_fields)
    is_unknown = problem["type"] == "extra_forbidden" and may_have_secrets
    is_free = _free_from(path, root) < len(path) or problem["type"] == "invalid_key"
    is_secret = any(isinstance(part, str) and (is_secret_name(part) or part == "args") for part in path)
    is_whole = problem["type"] in _NOT_A_SECTION
    if is_unknown or is_free or is_secret or is_whole or not isinstance(value, str | int | float | None):
        return type(value).__name__
    return mask_secrets(repr(value))


def _free_from(path: Sequence[str | int], root: type[BaseModel]) -> int:
    """Return the index of the first part of a path that is a key of free settings, or the path's length."""
    field: FieldInfo | None = None
    section: type[BaseModel] | None = root
    for at, part in enumerate(path):
        if field is not None and any(typing.get_origin(each) is dict for each in _options(field)):
            return at
        if isinstance(part, int) and field is not None:
            continue
        field = None if section is None else _fields_of(section).get(str(part))
        if field is None:
            return len(path) if at == len(path) - 1 and isinstance(part, str) else at
        section = _model_in(field)
    return len(path)


def _options(field: FieldInfo) -> tuple[object, ...]:
    """Return the types that a field may have."""
    kind = field.annotation
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field is, or a list of sections has."""
    for kind in _options(field):
        inner = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


def _instead(path: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the probable meaning of the unknown field at `path`."""
    section: type[BaseModel] | None = root
    for part in path[:-1]:
        if isinstance(part, str) and section is not None:
            field = _fields_of(section).get(part)
            section = None if field is None else _model_in(field)
    if section is None:
        return "unknown field"
    known, name = list(_fields_of(section)), str(path[-1])
    inner = {each: _model_in(field) for each, field in _fields_of(section).items()}
    close = [f"{each}.{name}" for each, kind in inner.items() if kind is not None and name in _fields_of(kind)]
    close = close or get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}?" if close else f"expected one of {known!r}"
    return f"unknown field, {meant}"
