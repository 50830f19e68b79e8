"""The `dlac` command as a person or a script uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.conftest import Arena

DLAC = Path(sys.executable).parent / "dlac"


def dlac(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run one command on the lakehouse in `home`."""
    return subprocess.run([str(DLAC), *arguments, "--home", str(home)], capture_output=True, text=True, check=False)


def write_spec(arena: Arena, run: str) -> Path:
    """A job spec file of a small run of one rank."""
    path = arena.home / f"{run}.json.yaml"
    path.write_text(arena.spec(run, world_size=1, passes=1).model_dump_json())
    return path


def test_a_run_is_planned_trained_looked_at_and_audited_from_the_command_line(arena: Arena) -> None:
    """plan, train, status, audit and sql agree about the run, and the printed SQL answers without DLAC."""
    arena.table(appends=(300, 300))
    spec = write_spec(arena, "by-hand")
    planned = json.loads(dlac("plan", str(spec), "--json", home=arena.home).stdout)
    assert planned["live_rows"] == 600
    trained = dlac("train", str(spec), home=arena.home)
    assert trained.returncode == 0, trained.stderr
    status = json.loads(dlac("status", "by-hand", "--json", home=arena.home).stdout)
    assert (status["state"], status["step"]) == ("finished", 19)
    audit = dlac("audit", "by-hand", "--json", home=arena.home)
    report = json.loads(audit.stdout)
    assert audit.returncode == 0
    assert (report["exact"], report["rows_consumed"], report["passes_finished"]) == (True, 600, 1)
    asked = dlac("sql", "SELECT max(step) AS step FROM lineage WHERE run = 'by-hand'", "--json", home=arena.home)
    assert json.loads(asked.stdout) == [{"step": 19}]
    script = dlac("audit", "by-hand", "--explain", home=arena.home).stdout
    with duckdb.connect() as plain:
        assert plain.execute(script).fetchall()
    again = dlac("train", str(spec), home=arena.home)
    assert again.returncode == 82
    assert "RunFinished" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("status", "nobody"), 64, "NoSuchRun"),
        (("audit", "nobody"), 64, "NoSuchRun"),
        (("recover", "nobody"), 64, "NoSuchRun"),
        (("train", "missing.toml"), 64, "SpecInvalid"),
        (("sql", "SELEC 1"), 64, "syntax error"),
    ],
)
def test_a_wrong_request_is_one_clear_error_and_its_exit_status(
    arena: Arena, arguments: tuple[str, ...], status: int, said: str
) -> None:
    """No traceback: what was expected, what was found, and a status that schedulers can read."""
    done = dlac(*arguments, home=arena.home)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_every_wrong_field_of_a_spec_is_named_at_once(arena: Arena) -> None:
    """A spec with three mistakes is mended in one go, not in three."""
    path = arena.home / "bad.toml"
    path.write_text(
        'run = "a b"\n[source]\ntable = "src.t"\ncolumns = ["x", "x"]\n'
        '[order]\nbatch_size = 30\nkey_groups = 8\n[launch]\nscript = "x.py"\n'
    )
    done = dlac("train", str(path), home=arena.home)
    assert done.returncode == 64
    for named in ("run:", "source.columns:", "order:"):
        assert named in done.stderr


def test_help_explains_every_command() -> None:
    """`dlac --help` lists each command with a sentence."""
    shown = subprocess.run([str(DLAC), "--help"], capture_output=True, text=True, check=True).stdout
    for command in ("plan", "train", "recover", "status", "audit", "sql", "demo"):
        assert f" {command} " in shown
