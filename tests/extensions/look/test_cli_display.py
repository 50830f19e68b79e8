"""What commands show of real runs: for programs, while a run starts, and when what is asked for is missing."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from dlac_pipeline.extensions.branches.appends import commit_rewind
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import Arena, wait_until
from tests.fixtures import Command
from tests.forked import Forked
from tests.integration.test_cli import DLAC

LONG = "team-nlp.llama-continual-pretraining-2026-11-23-with-a-very-long-name"


def test_runs_are_listed_for_programs(arena: Arena, here: Command) -> None:
    """One object for each run, the last active first; an empty ledger is an empty list, and a sentence for people."""
    assert json.loads(here("runs", "--json", home=arena.home).stdout) == []
    assert "no run yet" in here("runs", home=arena.home).stdout
    arena.table(appends=(300,))
    settings: dict[str, Any] = {"world_size": 1, "passes": 1, "every_steps": 4}
    for run, until in (("whole", None), ("young", 2), ("back", 9)):
        arena.train(arena.spec(run, **settings), until=until)
    ledger = Ledger(arena.lakehouse)
    commit_rewind(ledger, "back", nonce="n", checkpoint_id=ledger.restorable("back", 4).checkpoint_id)
    fork_run(arena.lakehouse, arena.spec(LONG, **settings), "whole", step=4)
    found = {each["run"]: each for each in json.loads(here("runs", "--json", home=arena.home).stdout)}
    assert [found[run]["step"] for run in ("whole", "young", "back", LONG)] == [10, 0, 4, 0]
    assert [found[run]["total_steps"] for run in ("whole", "young", "back")] == [10, None, 10]
    assert [found[run]["attempts"] for run in ("whole", "back")] == [1, 2]
    assert found["young"]["head_committed_at"] is None
    arena.monkeypatch.delenv("DLAC_HOME")  # else a command finds the lakehouse without an option
    for run in ("back", LONG):
        status = json.loads(here("status", run, "--json", home=arena.home).stdout)
        assert (status["launch"], status["step"]) == (found[run]["launch"], found[run]["step"])
        assert status["next_command"] == f"{found[run]['next_command']} --home {arena.home}"


@pytest.mark.slow
def test_watch_waits_for_starting_run(arena: Arena) -> None:
    """Neither the lakehouse nor the run need be there; Ctrl-C ends the watch without a word."""
    home = arena.home.parent / "later"
    command = [str(DLAC), "status", "r", "--watch", "--every-s", "0.1", "--home", str(home)]
    log = arena.home / "watched.jsonl"

    def looks() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    with log.open("wb") as stream:
        watching = Forked(command, stdout=stream, stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: bool(looks()), what="a look at nothing")
        assert (looks()[0]["state"], str(home) in looks()[0]["waits_for"]) == ("waiting", True)
        later = type(arena)(home, arena.monkeypatch)
        later.table(appends=(300,))
        wait_until(
            lambda: "in the ledger" in looks()[-1].get("waits_for", ""), what="a look at a lakehouse without the run"
        )
        later.train(later.spec("r", world_size=1, passes=1, every_steps=4), until=9)
        wait_until(
            lambda: (looks()[-1].get("step"), looks()[-1]["state"]) == (8, "dead"), what="a look at the run that ended"
        )
        os.kill(watching.pid, signal.SIGINT)
        assert watching.communicate(timeout=60)[1] == b""
        assert watching.returncode == 0
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("checkpoint", "verify", "r", "--step", "7"), "NoSuchCheckpoint"),
        (("checkpoint", "export", "r", "out.safetensors", "--step", "7"), "NoSuchCheckpoint"),
        (("checkpoint", "untag", "r", "best"), "NoSuchCheckpoint"),
        (("rewind", "r", "--to-step", "7"), "NoSuchCheckpoint"),
        (("audit", "r", "--checkpoint", "7"), "NoSuchCheckpoint"),
        (("recover", "r"), "NoSuchJobSpec"),
        (("status", "nope"), "NoSuchRun"),
        (("recover", "nope"), "NoSuchRun"),
        (("incidents", "nope"), "NoSuchRun"),
    ],
)
def test_what_is_missing_is_named(runs_of_one: Arena, here: Command, arguments: tuple[str, ...], kind: str) -> None:
    """A run, a checkpoint of a run, and its job spec are three things; each has its error."""
    more = ("--spec", str(runs_of_one.home / "r.yaml")) if "export" in arguments and kind == "NoSuchCheckpoint" else ()
    done = here(*arguments, *more, home=runs_of_one.home)
    assert done.returncode == 64
    assert f"error: {kind}: expected " in done.stderr


@pytest.fixture(scope="module")
def runs_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A lakehouse with one run, which has checkpoints at steps 4 and 8."""
    from tests.conftest import Arena as Made

    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Made(tmp_path_factory.mktemp("one"), monkeypatch)
        arena.table(appends=(300,))
        arena.train(arena.spec("r", world_size=1, passes=1, every_steps=4), until=9)
        yield arena
