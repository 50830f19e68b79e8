import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import dlac_pipeline
from dlac_pipeline.cli.extension_commands import COMMANDS, load_command
from dlac_pipeline.cli.main import app
from dlac_pipeline.spec.spec_problems import bounds_of, describe_problem, holds_numbers

ABSURD = [math.inf, -math.inf, math.nan, "inf", "-Infinity", "nan", 1e308, -1e308, 10**30, 10**400, -1, True, False]
"""Values that no numeric setting accepts. Only seeds and ids accept 2**63."""


LOOKED_UP = {"step", "to_step", "snapshot_id", "rank"}
"""Numbers that must name an existing thing, without bounds."""


def models() -> set[type[BaseModel]]:
    """Return every pydantic model of the package. Only modules with such a class are imported."""
    package = Path(dlac_pipeline.__path__[0])
    for file in package.rglob("*.py"):
        if re.search(r"^class \w+\(.*(BaseModel|Section|Config)", file.read_text(), re.MULTILINE):
            importlib.import_module(".".join(file.relative_to(package.parent).with_suffix("").parts))
    found, pending = set(), [BaseModel]
    while pending:
        pending += (below := pending.pop().__subclasses__())
        found |= {each for each in below if each.__module__.startswith("dlac_")}
    return found


def numeric_settings() -> Iterator[tuple[type[BaseModel], str]]:
    """Yield every numeric field of every model."""
    for model in sorted(models(), key=lambda each: (each.__module__, each.__name__)):
        for name, field in model.model_fields.items():
            if holds_numbers(field):
                yield model, name


def test_every_number_is_bounded() -> None:
    """Each numeric field has a minimum and a maximum, and refuses absurd values by name, with the bound and the value."""
    settings = list(numeric_settings())
    assert {"weight", "world_size", "cpu", "wait_s", "outage_s", "keep_snapshots"} <= {name for _, name in settings}
    for model, name in settings:
        field = model.model_fields[name]
        assert len(bounds_of(field)) == 2, f"{model.__name__}.{name} has no finite bounds"
        for value in (*ABSURD, 2**63):
            if value == -1 and name in LOOKED_UP:
                continue
            listed = str(field.annotation).startswith("list")
            with pytest.raises(ValidationError) as caught:
                model.model_validate({name: [value] if listed else value})
            problems = [describe_problem(each, model) for each in caught.value.errors() if each["loc"][0] == name]
            assert problems, f"{model.__name__}.{name} takes {value!r}"
            assert repr(value) in problems[0], problems
            assert any(str(bound) in problems[0] for bound in bounds_of(field).values()), problems


def commands_of(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words that name each command, and the command."""
    if not isinstance(command, TyperGroup):
        yield words, command
        return
    for name, each in command.commands.items():
        yield from commands_of(each, *words, name)


def test_every_option_is_bounded() -> None:
    """Each numeric option of the core and of extensions has bounds, and a fractional one refuses NaN by name."""
    command: Any = get_command(app)
    for name in COMMANDS.points():
        group, _, last = name.rpartition(".")
        (command.commands[group] if group else command).commands[last] = load_command(name)
    found = 0
    for words, each in commands_of(command):
        for option in each.params:
            kind = option.type_descriptor.annotation
            if kind not in (int, float) or option.name in LOOKED_UP:
                continue
            found += 1
            assert None not in (option.min, option.max), (words, option.name)
            if kind is float:
                needed = ["x" for one in each.params if one.param_type_name == "argument"]
                result = CliRunner().invoke(app, [*words, *needed, f"{option.opts[0]}=nan"])
                assert (result.exit_code, option.opts[0] in result.output) == (2, True), result.output
    assert found >= 10
