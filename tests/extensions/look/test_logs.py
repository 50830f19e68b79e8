"""`dlac logs`: the output of ranks, where it is, and why it is not there."""

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.elastic.ranks.launch_folder import log_file
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import Arena, wait_until
from tests.fixtures import Command
from tests.forked import Forked

DLAC = Path(sys.executable).parent / "dlac"
Logs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def logs(arena: Arena, here: Command) -> Logs:
    """Run `dlac logs` in this process; returns its exit status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        done = here("logs", *arguments, home=arena.home)
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return run


def launch(arena: Arena, attempt: int, texts: dict[int, str], **detail: Any) -> Path:
    """Leave what an attempt of a run leaves: its claim, and the logs of its ranks."""
    folder = arena.home / "checkpoints" / "r" / f"launch-{attempt}"
    folder.mkdir(parents=True)
    for rank, text in texts.items():
        log_file(folder, rank).write_text(text)
    (folder / "resume.json").write_text(json.dumps({"attempt": attempt}))
    said = {"launch_folder": str(folder), "host": socket.gethostname(), **detail}
    claim(Ledger(arena.lakehouse), "r", nonce=str(attempt), replaces=attempt - 1, facts=said)
    return folder


def test_logs_of_last_attempt(arena: Arena, logs: Logs) -> None:
    """All lines, or only some ranks, lines or another attempt. A rewind, which trains nothing, has none."""
    launch(arena, 1, {0: "first\n"})
    launch(arena, 2, {0: "a\nb\nc\n", 1: "d\n\x1b[2Je"})
    claim(Ledger(arena.lakehouse), "r", nonce="rewind", replaces=2, facts={"purpose": "rewinds", "origin": "x"})
    assert logs("r")[:2] == (0, "[rank 0] a\n[rank 0] b\n[rank 0] c\n[rank 1] d\n[rank 1] e\n")
    assert logs("r", "--rank", "1")[:2] == (0, "d\ne\n")
    assert logs("r", "--tail", "1")[:2] == (0, "[rank 0] c\n[rank 1] e\n")
    assert logs("r", "--attempt", "1")[:2] == (0, "first\n")


def test_logs_of_led_nodes(arena: Arena, logs: Logs) -> None:
    """A following node has a separate launch folder, which no claim names, in the same folder of the run."""
    led = launch(arena, 1, {0: "a\n"}).with_name("launch-led")
    led.mkdir()
    log_file(led, 1).write_text("b\n")
    for text in ("", "{", "[]", '{"attempt": 2}'):
        (led / "resume.json").write_text(text)
        assert logs("r")[:2] == (0, "a\n")
    (led / "resume.json").write_text('{"attempt": 1}')
    assert logs("r")[:2] == (0, "[rank 0] a\n[rank 1] b\n")


def test_missing_logs_are_explained(arena: Arena, logs: Logs) -> None:
    """The reason is named: another node, an old attempt, another launcher, a start that is under way, or a wrong number."""
    code, out, err = logs("r")
    assert (code, out) == (64, "")
    assert "NoSuchRun" in err
    folder = launch(arena, 1, {})
    assert "have not started" in logs("r")[2]
    log_file(folder, 0).write_text("a\n")
    assert "found ranks 0" in logs("r", "--rank", "3")[2]
    assert "found --attempt 7" in logs("r", "--attempt", "7")[2]
    log_file(folder, 1).mkdir()
    assert "Is a directory" in logs("r")[2]
    shutil.rmtree(folder)
    assert "old attempts are removed" in logs("r")[2]
    launch(arena, 2, {}, launch_folder="/elsewhere/r/launch-2", host="node-7")
    assert "'node-7'" in logs("r")[2]
    launch(arena, 3, {}, launch_folder="")
    code, out, err = logs("r")
    assert (code, out) == (64, "")
    assert "torchrun" in err


def test_follow_ends_with_run(arena: Arena) -> None:
    """What ranks append is printed, also by a later attempt, until the run is finished."""
    folder = launch(arena, 1, {0: "a\n"})
    out = arena.home / "out"
    with out.open("w") as stream:
        process = Forked([str(DLAC), "logs", "r", "--follow", "--home", str(arena.home)], stdout=stream)
        wait_until(lambda: out.read_text() == "a\n", what="what was there")
        with log_file(folder, 0).open("a") as log:
            log.write("b\n")
        wait_until(lambda: out.read_text() == "a\nb\n", what="what was appended")
        launch(arena, 2, {0: "c\n"})
        wait_until(lambda: out.read_text() == "a\nb\nc\n", what="the next attempt")
        with log_file(arena.home / "checkpoints" / "r" / "launch-2", 0).open("a") as log:
            log.write("unended")
        finish(Ledger(arena.lakehouse), Attempt(run="r", number=2, nonce="2"), step=0)
        assert process.wait(60) == 0
    assert out.read_text() == "a\nb\nc\nunended\n"
