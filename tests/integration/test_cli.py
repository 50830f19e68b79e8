"""The `dlac` command as a person or a script uses it."""

import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from dlac_pipeline.lakehouse.errors import SpecInvalid
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


def test_run_works_from_command_line(arena: Arena, here: Command) -> None:
    """plan, train, status, audit and sql agree about the run, and the printed SQL answers without DLAC."""
    arena.table(appends=(300, 300))
    spec = arena.home / "by-hand.json.yaml"
    spec.write_text(arena.spec("by-hand", world_size=1, passes=1).model_dump_json())
    assert json.loads(here("plan", str(spec), "--json", home=arena.home).stdout)["live_rows"] == 600
    trained = dlac("train", str(spec), home=arena.home)
    assert trained.returncode == 0, trained.stderr
    status = json.loads(here("status", "by-hand", "--json", home=arena.home).stdout)
    assert (status["state"], status["step"]) == ("finished", 19)
    audit = here("audit", "by-hand", "--json", home=arena.home)
    report = json.loads(audit.stdout)
    assert audit.returncode == 0
    assert (report["exact"], report["rows_consumed"], report["passes_finished"]) == (True, 600, 1)
    asked = here("sql", "SELECT max(step) AS step FROM lineage WHERE run = 'by-hand'", "--json", home=arena.home)
    assert json.loads(asked.stdout) == [{"step": 19}]
    script = here("audit", "by-hand", "--explain", home=arena.home).stdout
    with duckdb.connect() as plain:
        assert plain.execute(script).fetchall()
    again = here("train", str(spec), home=arena.home)
    assert again.returncode == 82
    assert "RunFinished" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("train", "missing.toml"), 64, "SpecInvalid"),
        (("sql", "SELEC 1"), 64, "syntax error"),
        (("sql", ""), 64, "expected a query"),
        (("sql", "SELECT '[/a]' FROM nowhere"), 64, "[/a]"),
        (("checkpoint", "identify", "/"), 2, "directory"),
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
    """A new, an empty and a demo's own folder are emptied and marked. A folder with something else in it is kept."""
    home = tmp_path / "home"
    empty_home(home)
    (home / "catalog.db").touch()
    empty_home(home)
    assert [path.name for path in home.iterdir()] == [MARKER]
    with pytest.raises(SpecInvalid, match=f"found '{tmp_path}'"):
        empty_home(tmp_path)
    assert list(tmp_path.iterdir()) == [home]


@pytest.mark.slow
def test_unwritable_output_is_one_line(arena: Arena) -> None:
    """A full disk under standard output is reported as a full disk."""
    command = [str(DLAC), "sql", "SELECT 1", "--home", str(arena.home)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (74, 1)
    assert "No space left" in done.stderr
