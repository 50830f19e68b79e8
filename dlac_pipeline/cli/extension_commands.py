"""The door `dlac.commands`: commands of extensions, which are imported when they are named.

An extension registers a function, or a Typer app with subcommands, under the name of its command:

    [project.entry-points."dlac.commands"]
    energy = "dlac_energy.commands:energy"

`dlac --help` reads the source of the module and does not import it:

- The text is the first line of the docstring of the function, or the `help` of `energy = typer.Typer(help="...")`.
- The panel is the module's constant `PANEL = "Look"`. Unset: Extensions.

The entry "table.register" is the command `dlac table register`, if the group is extensible.
"""

import ast
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput

COMMANDS = Door("dlac.commands", "command")
_ORDER = (
    *("plan", "train", "rendezvous", "recover", "rewind", "status", "runs", "incidents", "logs", "audit"),
    *("table", "ledger", "sql", "rows", "checkpoint", "list", "tag", "untag", "verify", "retire"),
)
"""First names of the help and of each group. The others follow in the order of the alphabet."""


class ExtensibleGroup(TyperGroup):
    """The commands of the core, and then those of extensions. A name of the core's is never an extension's."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of this group's entries."""
        return ""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names for the help. A command of an extension has the text in the source of its module."""
        for name, point in self._points().items():
            if name not in self.commands:
                self.commands[name] = ListedCommand(name, point)
        return sorted(
            super().list_commands(ctx), key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command that is named. An extension is imported now."""
        known = self.commands.get(args[0])
        if known is None or isinstance(known, ListedCommand):
            if point := self._points().get(args[0]):
                self.commands[args[0]] = load_command(point.name)
            else:
                self.list_commands(ctx)  # names among which the error suggests one
                self._refuse_inner(ctx, args[0])
        return super().resolve_command(ctx, args)

    def _points(self) -> dict[str, EntryPoint]:
        """Return the extensions' commands of this group."""
        points, prefix = COMMANDS.points(), self.prefix
        found = {name.removeprefix(prefix): each for name, each in points.items() if name.startswith(prefix)}
        return {name: each for name, each in found.items() if "." not in name}

    def _refuse_inner(self, ctx: Any, name: str) -> None:
        """Refuse a command that belongs to a group, with the words that call it."""
        groups = {key: each for key, each in self.commands.items() if isinstance(each, TyperGroup)}
        inner = [f"{key} {name}" for key, each in groups.items() if name in each.commands]
        inner += [point.replace(".", " ") for point in COMMANDS.points() if point.endswith(f".{name}")]
        if inner and not self.prefix:
            ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(map(repr, inner))}?")


class InnerGroup(ExtensibleGroup):
    """A group of commands in `dlac`. The entry "table.register" is the command `register` of the group `table`."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of this group's entries."""
        return f"{self.name}."


class ListedCommand(TyperCommand):
    """A command of an extension in the help of `dlac`. Its module is not imported."""

    def __init__(self, name: str, point: EntryPoint) -> None:
        text, panel = f"Command of {point.value}.", "Extensions"
        with suppress(AttributeError, ImportError, OSError, ValueError, SyntaxError):  # there is no readable source
            for node in ast.parse(Path(_find_module(point.module).origin or "").read_bytes()).body:
                if isinstance(node, ast.FunctionDef) and node.name == point.attr:
                    text = ast.get_docstring(node) or text
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PANEL":
                    panel = str(ast.literal_eval(node.value))
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == point.attr:
                    options = node.value.keywords if isinstance(node.value, ast.Call) else []
                    text = next((ast.literal_eval(each.value) for each in options if each.arg == "help"), text)
        super().__init__(name, help=text, rich_help_panel=None if "." in point.name else panel)


def load_command(name: str) -> Any:
    """Import the extension of a command, and return the command.

    Raise `BadInput` if its packages are missing, or it is neither a function nor a Typer app.
    """
    loaded, root = COMMANDS.load(name, setting="command"), typer.Typer()
    name = name.rpartition(".")[2]
    if isinstance(loaded, typer.Typer):
        root.add_typer(loaded, name=name)
    elif callable(loaded):
        root.command(name, epilog=getattr(loaded, "epilog", None))(loaded)
    else:
        raise BadInput(
            f"expected a function or a Typer app as command {name!r}, found {loaded!r}: upgrade its extension"
        )
    return get_group(root).commands[name]


def _find_module(name: str) -> ModuleSpec:
    """Find a module without importing its packages. Raise `ImportError` if there is none."""
    top, *rest = accumulate(name.split("."), "{}.{}".format)
    spec = find_spec(top)
    for each in rest:
        spec = spec and PathFinder.find_spec(each, spec.submodule_search_locations)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return spec
