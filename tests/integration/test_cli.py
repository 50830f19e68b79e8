"""The `dlac` command as a person or a script uses it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from examples.demo.main_job import MARKER, empty_home
from tests.conftest import Arena
from tests.fixtures import Command
from tests.forked import Forked

DLAC = Path(sys.executable).parent / "dlac"


def dlac(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run one command on the lakehouse in `home`."""
    command = [str(DLAC), *arguments, "--home", str(home)]
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said, failed = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, said, failed)


def write_spec(arena: Arena, run: str) -> Path:
    """A job spec file of a small run of one rank."""
    path = arena.home / f"{run}.json.yaml"
    path.write_text(arena.spec(run, world_size=1, passes=1).model_dump_json())
    return path


def test_run_works_from_command_line(arena: Arena, here: Command) -> None:
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
    asked = here("sql", "SELECT max(step) AS step FROM lineage WHERE run = 'by-hand'", "--json", home=arena.home)
    assert json.loads(asked.stdout) == [{"step": 19}]
    script = here("audit", "by-hand", "--explain", home=arena.home).stdout
    with duckdb.connect() as plain:
        assert plain.execute(script).fetchall()
    done = {
        each["table"]: each
        for each in json.loads(here("ledger", "upkeep", "--keep", "1", "--json", home=arena.home).stdout)
    }
    assert done["consumption"]["expired_snapshots"] > 0
    assert done["consumption"]["removed_files"] > 0
    assert "consumption" in here("ledger", "upkeep", home=arena.home).stdout
    assert here("audit", "by-hand", home=arena.home).returncode == 0
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
        (("sql", ""), 64, "expected a query"),
        (("sql", " ; "), 64, "expected a query"),
        (("sql", "SELECT '[/a]' FROM nowhere"), 64, "[/a]"),
        (("status", "[/a]"), 64, "[/a]"),
    ],
)
def test_wrong_request_is_one_clear_error(
    arena: Arena, here: Command, arguments: tuple[str, ...], status: int, said: str
) -> None:
    """No traceback: what was expected, what was found, and a status that schedulers can read."""
    done = here(*arguments, home=arena.home)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_values_of_sql_come_as_they_are(arena: Arena, here: Command) -> None:
    """Text that looks like markup is shown, NULL differs from text, and a decimal is a number in JSON."""
    query = "SELECT '[/a] :x:' AS \"[/b]\", NULL AS nothing, 1.50::DECIMAL(9, 2) AS price, sum(2) AS total"
    shown = here("sql", query, home=arena.home)
    assert shown.returncode == 0, shown.stderr
    assert all(text in shown.stdout for text in ("[/a] :x:", "[/b]", "NULL", "1.50"))
    answered = json.loads(here("sql", query, "--json", home=arena.home).stdout)
    assert answered == [{"[/b]": "[/a] :x:", "nothing": None, "price": 1.5, "total": 2}]


def test_the_demo_deletes_only_what_a_demo_made(tmp_path: Path) -> None:
    """A folder with something else in it is refused by name, and keeps it."""
    (tmp_path / "thesis.tex").touch()
    command = [sys.executable, "-m", "examples.demo.main_job", "--home", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert str(tmp_path) in done.stderr + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    """A new, an empty and a demo's own folder become an empty one that is marked."""
    home = tmp_path / "home"
    empty_home(home)
    (home / "catalog.db").touch()
    empty_home(home)
    assert [path.name for path in home.iterdir()] == [MARKER]


@pytest.mark.parametrize("more", [(), pytest.param(("--json",), marks=pytest.mark.soak)])
def test_unwritable_output_is_one_line(arena: Arena, more: tuple[str, ...]) -> None:
    """A full disk under standard output is reported as a full disk. A closed standard output is no error."""
    command = [str(DLAC), "sql", "SELECT 1", *more, "--home", str(arena.home)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (74, 1)
    assert "No space left" in done.stderr
    closed = subprocess.run(f"{shlex.join(command)} >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_folder_is_no_file_of_weights(arena: Arena) -> None:
    """`dlac checkpoint identify` refuses a folder in one line."""
    done = dlac("checkpoint", "identify", str(arena.home), home=arena.home)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
