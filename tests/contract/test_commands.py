"""The contract of commands: of DLAC's extensions and of a third party's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from dlac_pipeline.cli.extension_commands import COMMANDS, load_command
from dlac_pipeline.cli.main import app
from dlac_pipeline.lakehouse.errors import BadInput
from tests.installed import install_distribution

_FUNCTION = '''
PANEL = "Look"

def energy(run: str) -> None:
    """Sum the energy that a run took.

    In watt hours.
    """
    print(f"{run}: 7 Wh")
'''
_APP = '''
import typer

power = typer.Typer(help="Measure the power of nodes.")

@power.command()
def now() -> None:
    """Print the power of this node."""
    print("7 W")
'''
_MODULES = {"meter_energy": _FUNCTION, "meter_power": _APP, "meter_solar": "import panels_that_are_missing"}
_POINTS = [
    *("energy = meter_energy:energy", "power = meter_power:power", "solar = meter_solar:solar [sun]"),
    *("wind = meter_energy:PANEL", "train = meter_energy:energy"),
]
_OURS = [name for name, point in COMMANDS.points().items() if point.module.startswith("dlac_pipeline.")]
_TOP = [name for name in _OURS if "." not in name]
_GROUPS = ("Train", "Recover", "Look", "Audit", "Storage")
_LISTED = """
import json, sys
from dlac_pipeline.cli.main import app
app(["--help"], standalone_mode=False)
print(json.dumps([*sys.modules]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A distribution with a function, an app, a function whose package is missing, a text, and a name of the core's."""
    folder = install_distribution(tmp_path_factory.mktemp("meter"), "meter", _MODULES, {"dlac.commands": _POINTS})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("COLUMNS", "300")
        yield folder


def listed(*group: str) -> list[str]:
    """Return the lines of `dlac --help`, or of a group, without the frame."""
    return [line.strip("│ ") for line in CliRunner().invoke(app, [*group, "--help"]).output.splitlines()]


def test_help_imports_no_extension(installed: Path) -> None:
    """`dlac --help` has a line of each command of an extension, and imports neither its module nor its package."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "300"}
    done = subprocess.run([sys.executable, "-c", _LISTED], env=environment, capture_output=True, text=True, check=True)
    *shown, imported = done.stdout.splitlines()
    packages = tuple(COMMANDS.points()[name].module.rpartition(".")[0] for name in _OURS)
    assert [name for name in json.loads(imported) if name.startswith((*packages, "meter_"))] == []
    assert {*_TOP, "energy", "power", "solar"} <= {line.split()[1] for line in shown if line.startswith("│ ")}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [*_OURS, "energy", "power"])
def test_command_shows_listed_line(name: str) -> None:
    """The line of a command in the help of `dlac`, or of its group, begins the help of the command."""
    *group, last = name.split(".")
    [line] = [each.removeprefix(last).strip() for each in listed(*group) if each.startswith(f"{last} ")]
    assert len(line) > 20
    shown = CliRunner().invoke(app, [*group, last, "--help"])
    assert (shown.exit_code, line in shown.output) == (0, True), shown.output
    assert load_command(name).help.partition("\n\n")[0] == line


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("words", "output"), [(["energy", "night"], "night: 7 Wh\n"), (["power", "now"], "7 W\n")])
def test_named_command_runs(words: list[str], output: str) -> None:
    """A command of another distribution runs as one of the core's."""
    assert CliRunner().invoke(app, words).output == output


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("solar", "found No module named 'panels_that_are_missing': pip install \"meter[sun]\""),
        ("wind", "expected a function or a Typer app as command 'wind', found 'Look'"),
    ],
)
def test_unusable_command_is_named(name: str, message: str) -> None:
    """A command that cannot be imported is an error only when it is asked for."""
    with pytest.raises(BadInput) as refused:
        app([name], standalone_mode=False)
    assert message in str(refused.value)


@pytest.mark.usefixtures("installed")
def test_unknown_command_suggests_extension() -> None:
    """A mistyped name finds the commands of the core and of extensions. One of the core's is never another's."""
    assert "No such command 'enrgy'. Did you mean 'energy'?" in CliRunner().invoke(app, ["enrgy"]).output
    assert "Train a run to its end" in CliRunner().invoke(app, ["train", "--help"]).output


@pytest.mark.parametrize(
    ("name", "meant"), [("verify", "checkpoint verify"), ("register", "table register"), ("adopt", "checkpoint adopt")]
)
def test_command_of_group_is_suggested(name: str, meant: str) -> None:
    """A name that only a group has is refused with the group before it."""
    assert f"No such command {name!r}. Did you mean {meant!r}?" in CliRunner().invoke(app, [name]).output


def test_commands_are_grouped_with_examples() -> None:
    """The core has at most 24 commands, each in one of the groups. The help of each command has examples that call it."""
    core = get_command(app)
    assert isinstance(core, TyperGroup)
    assert len(core.commands) <= 24
    listed: dict[str, Any] = dict(core.commands)
    assert {each.rich_help_panel for each in listed.values()} <= set(_GROUPS)
    for name, command in {**listed, **{name: load_command(name) for name in _OURS}}.items():
        parts: dict[str, Any] = dict(command.commands) if isinstance(command, TyperGroup) else {"": command}
        for part, each in parts.items():
            assert f"$ dlac {name.replace('.', ' ')} {part}".rstrip() in each.epilog
