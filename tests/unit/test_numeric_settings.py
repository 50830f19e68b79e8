from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import dlac_pipeline
from dlac_pipeline.cli.extension_commands import COMMANDS, load_command
from dlac_pipeline.cli.main import app
from dlac_pipeline.extensions.dataset import open_dataset
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.spec.spec_problems import bounds_of, describe_problem, holds_numbers

ABSURD = [math.inf, -math.inf, math.nan, "inf", "-Infinity", "nan", 1e308, -1e308, 10**30, 10**400, -1, True, False]
"""Values that no numeric setting accepts. Only seeds and ids accept 2**63."""


LOOKED_UP = {"step", "to_step", "snapshot_id", "rank"}
"""Numbers that must name an existing thing, without bounds."""


def models() -> set[type[BaseModel]]:
    """Return every pydantic model of the package."""
    for module in pkgutil.walk_packages(dlac_pipeline.__path__, "dlac_pipeline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
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


def kind(option: Any) -> object:
    """Return the type of an option or argument of the command line."""
    return option.type_descriptor.annotation


def bounds(option: Any) -> tuple[str, str]:
    """Return the minimum and the maximum of an option."""
    return str(option.min), str(option.max)


def commands_of(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words that name each command, and the command."""
    if not isinstance(command, TyperGroup):
        yield words, command
        return
    for name, each in command.commands.items():
        yield from commands_of(each, *words, name)


def test_every_option_is_bounded() -> None:
    """Each numeric option of the command line has bounds, or is a setting. Values outside are refused."""
    runner, command = CliRunner(), get_command(app)
    assert isinstance(command, TyperGroup)
    found = 0
    for name in COMMANDS.points():
        group, _, last = name.rpartition(".")
        home = command.commands[group] if group else command
        assert isinstance(home, TyperGroup)
        home.commands[last] = load_command(name)
    for words, each in commands_of(command):
        for option in each.params:
            if kind(option) not in (int, float) or option.name in LOOKED_UP | set(LaunchSpec.model_fields):
                continue
            found += 1
            for value in ("inf", "nan", "1e308", str(10**30), "-1"):
                needed = ["x" for one in each.params if one.param_type_name == "argument"]
                result = runner.invoke(app, [*words, *needed, f"{option.opts[0]}={value}"])
                assert result.exit_code == 2, (words, option.name, value, result.output, result.exception)
                assert f"--{str(option.name).replace('_', '-')}" in result.output
                problems = (value, *bounds(option), "valid integer")
                assert any(each in result.output for each in problems), result.output
    assert found >= 4


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e308, 10**30, -1, 0, 1.0, True, "2"])
def test_absurd_ranks_are_refused(value: Any) -> None:
    """`open_dataset` takes whole numbers of ranks that divide the batch, and its error has the value found."""
    settings: dict[str, Any] = {"table": "src.t", "columns": ["x"], "batch_size": 16}
    found = f"found {re.escape(repr(value))} of type {type(value).__name__}: give an int"
    number = type(value) is int
    with pytest.raises(
        SpecInvalid, match=f"found rank 0 of {value}" if number else rf"world_size of open_dataset\(\) .*{found}"
    ):
        open_dataset(rank=0, world_size=value, **settings)
    if value != 0:
        with pytest.raises(
            SpecInvalid, match=f"found rank {value} of 1" if number else rf"rank of open_dataset\(\) .*{found}"
        ):
            open_dataset(rank=value, world_size=1, **settings)
