"""Blank values of the `dlac` command."""

from collections.abc import Iterator
from inspect import signature
from itertools import chain
from typing import Any, get_args, get_type_hints

import pytest
import typer

from dlac_pipeline.cli.extension_commands import COMMANDS
from dlac_pipeline.cli.main import app
from dlac_pipeline.lakehouse.errors import SpecInvalid

_MAY_BE_BLANK = {"key", "document", "query", "why", "where", "exclude"}


def _functions(part: Any) -> Iterator[Any]:
    """Yield the function of each command of an app, or a function."""
    if not isinstance(part, typer.Typer):
        yield part
        return
    for group in part.registered_groups:
        yield from _functions(group.typer_instance)
    yield from (command.callback for command in part.registered_commands)


def _texts() -> Iterator[tuple[str, Any, bool]]:
    """Yield the parameters of each command that take texts, with the command, and whether they take several."""
    extensions = [point.load() for point in COMMANDS.points().values()]
    for function in chain.from_iterable(map(_functions, (app, *extensions))):
        for name, kind in get_type_hints(function).items():
            if str in (kind, *get_args(kind)) and name not in _MAY_BE_BLANK:
                yield name, function, False
            elif list[str] in (kind, *get_args(kind)) and name not in _MAY_BE_BLANK:
                yield name, function, True


@pytest.mark.parametrize("blank", ["", " "])
def test_each_command_refuses_blank_names(blank: str) -> None:
    """Names of runs, tables, columns, tags and the like are given or left out, and never blank."""
    found = list(_texts())
    known = {"run", "table", "columns", "checkpoint", "tag", "part", "source", "text", "by", "name", "new", "plan_id"}
    assert known <= {name for name, _, _ in found}
    for name, callback, is_list in found:
        if signature(callback).parameters[name].default != blank:
            with pytest.raises(SpecInvalid, match="blank"):
                callback(**{name: [blank] if is_list else blank})
