"""Ranks as processes: forked or spawned, signalled, ended, told of when they cannot be started. The scripts import nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from catalog.errors import TrainingFailed
from dlac_pipeline.ranks.group import HANG, Exit, RankGroup, RankProcess, spawn_rank
from dlac_pipeline.ranks.launch_folder import log_file
from dlac_pipeline.ranks.rank import pid_of
from dlac_pipeline.ranks.share import Share
from dlac_pipeline.ranks.starter import RankStarter
from dlac_pipeline.spec import JobSpec, parse_spec
from tests.conftest import wait_until

SLEEPS = "import time\ntime.sleep(60)\n"
LEAVES = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path(__file__).with_name("left").touch()))
Path(__file__).with_name("ready").touch()
time.sleep(60)
"""
"""A rank that answers SIGTERM, as one that commits a checkpoint does."""


def spec_of(folder: Path, script: str, **launch: Any) -> JobSpec:
    """A job of one script."""
    (folder / "script.py").write_text(script)
    return parse_spec(
        {
            "run": "r",
            "lakehouse": {"uri": "sqlite:///none.db", "warehouse": "file:///none"},
            "source": {"table": "src.t", "columns": ["x"]},
            "order": {"batch_size": 4, "key_groups": 4, "block_slices": 1, "seed": 1, "steps": 1},
            "checkpoint": {"store": str(folder), "local": str(folder)},
            "launch": {"script": str(folder / "script.py"), **launch},
        },
        origin="the test",
    )


@contextmanager
def started(spec: JobSpec, folder: Path, ranks: int = 1) -> Iterator[RankGroup]:
    """Ranks of a job, as its supervisor starts and ends them."""
    with closing(RankStarter()) as starter:
        group = RankGroup(spec, folder, Share(world_size=ranks, ranks=ranks, port=1), starter)
        try:
            yield group
        finally:
            group.end()


def held_up(folder: Path) -> dict[str, str]:
    """What keeps a new Python from getting to anything."""
    (folder / "sitecustomize.py").write_text(SLEEPS)
    return {"PYTHONPATH": str(folder)}


def children(name: str) -> list[psutil.Process]:
    """This process's living children of a name, from their first moment on; a test before may have left a dead one."""
    found = []
    for one in psutil.Process().children():
        with suppress(psutil.Error):  # it ends just now
            while one.status() != psutil.STATUS_ZOMBIE and not one.cmdline():
                time.sleep(0.01)  # the kernel gives it its program just now
            if one.status() != psutil.STATUS_ZOMBIE and re.search(name, " ".join(one.cmdline())):
                found.append(one)
    return found


def runs(pid: int) -> bool:
    """Whether a process is there that has not ended; 0 is none."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_signal_to_every_process_is_the_ranks_to_answer(tmp_path: Path, start: str) -> None:
    """Whoever ends a process tree signals the fork server and the undertaker, too: the ranks leave in good order all the same."""
    with started(spec_of(tmp_path, LEAVES, start=start), tmp_path) as ranks:
        between = [*children("fork.server"), *children("undertaker")]
        assert len(between) == (2 if start == "fork" else 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            for process in between:  # while they start
                process.send_signal(number)
        wait_until((tmp_path / "ready").exists, what="the script")
        for process in between:
            process.send_signal(signal.SIGTERM)
        ranks.ask_to_stop()
        wait_until(ranks.all_exited, what="the rank's end")
        assert (ranks.failures(), (tmp_path / "left").exists()) == ([], True)
        assert all(process.is_running() for process in between)
    assert not any(process.is_running() for process in between)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_are_told_apart_by_their_titles(tmp_path: Path, start: str) -> None:
    """In `ps`: each rank with its run, the fork server, and the undertaker with the launch that it watches."""
    with started(spec_of(tmp_path, LEAVES, start=start), tmp_path, ranks=2) as ranks:
        wait_until((tmp_path / "ready").exists, what="the script")
        wait_until(
            lambda: " ".join(psutil.Process(ranks.pids[1]).cmdline()).strip() == "dlac r rank 1/2", what="a title"
        )
        above = psutil.Process(ranks.pids[0]).parent()
        assert above is not None
        assert (above.pid == os.getpid()) == (start == "spawn")
        assert start == "spawn" or " ".join(above.cmdline()).strip() == "dlac r fork server"
        assert [one.cmdline()[-1] for one in children("undertaker.py")] == [str(tmp_path)]


def test_a_rank_gets_the_signals_dispositions_of_a_new_python(tmp_path: Path) -> None:
    """Nothing that ends a launch is blocked or ignored in the script of a forked rank, unless it is for this very process."""
    script = """
import signal, sys
from pathlib import Path
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
found = [(each in blocked, getattr(signal.getsignal(each), "__name__", signal.getsignal(each))) for each in numbers]
Path(sys.argv[0]).with_suffix(".found").write_text(repr(found))
"""
    spec = spec_of(tmp_path, script)
    found = Path(spec.launch.script).with_suffix(".found")
    with started(spec, tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        assert ranks.failures() == [], ranks.last_words(0)
    forked = found.read_text()
    subprocess.run([sys.executable, spec.launch.script], check=True)
    assert forked == found.read_text()
    assert "True" not in forked


def test_a_server_that_dies_before_it_has_forked_is_the_reason_of_its_ranks(tmp_path: Path) -> None:
    """There is no log of such a rank, and the failure names that of the server."""
    with started(spec_of(tmp_path, SLEEPS, env=held_up(tmp_path)), tmp_path, ranks=2) as ranks:
        (server,) = children("fork.server")
        server.kill()
        assert ranks.pids == [0, 0]
        failures = ranks.failures()
        assert [(failure.rank, failure.code, failure.kind) for failure in failures] == [
            (0, 1, "TrainingFailed"),
            (1, 1, "TrainingFailed"),
        ]
        assert "SIGKILL" in failures[0].message
        assert "fork-server-" in failures[0].message
        assert ranks.last_words(0)["log_tail"] == ""


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    """A rank that prints all day has a log which the supervisor has no room for; it may begin in the middle of a letter."""
    with started(spec_of(tmp_path, "pass", start="spawn"), tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        with log_file(tmp_path, 0).open("wb") as log:
            log.truncate(2**26)
            log.seek(0, os.SEEK_END)
            log.write("é".encode() * 2**16 + b"\n" + b"".join(b"line %d\n" % line for line in range(30)) + b"\xffend")
        tracemalloc.start()
        tail = ranks.last_words(0)["log_tail"]
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert tail.splitlines() == [*(f"line {line}" for line in range(11, 30)), "\N{REPLACEMENT CHARACTER}end"]
    assert peak_bytes < 2**22


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_log_of_talkative_rank_is_bounded(tmp_path: Path, start: str) -> None:
    """Its last words stay, however it was started, and the record of its exception."""
    script = "import os\nfor _ in range(300):\n    os.write(1, b'x' * 10**5 + b'\\n')\nraise ValueError('the end')"
    with started(spec_of(tmp_path, script, start=start, log_mb=1), tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        (failure,) = ranks.failures()
    assert (failure.kind, failure.origin) == ("ValueError", "script")
    assert failure.where.endswith(":4 in <module>")
    assert log_file(tmp_path, 0).stat().st_size <= 2**20
    assert ranks.last_words(0)["log_tail"].endswith("ValueError: the end")


def test_a_server_that_does_not_answer_is_a_hang(tmp_path: Path) -> None:
    """It is waited for as long as a rank may be silent while it starts."""
    spec = spec_of(tmp_path, SLEEPS, hang_timeout_s=0.1, start_timeout_s=1.0, env=held_up(tmp_path))
    began = time.monotonic()
    with started(spec, tmp_path, ranks=2) as ranks:
        (server,) = children("fork.server")
        server.suspend()
        assert ranks.pids == [0, 0]
        assert time.monotonic() - began >= 1.0
        assert [failure.kind for failure in ranks.failures()] == [HANG, HANG]


def test_what_cannot_be_imported_ahead_fails_in_the_rank(tmp_path: Path) -> None:
    """Where it is read, and in the script's own order; the server only says so in its log."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "accelerate.py").write_text("raise RuntimeError('no such device')")
    spec = spec_of(tmp_path, "import accelerate", env={"PYTHONPATH": str(tmp_path / "library")})
    with started(spec, tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        (failure,) = ranks.failures()
        assert (failure.kind, failure.message) == ("RuntimeError", "no such device")
        assert "could not be imported ahead" in (tmp_path / "r" / f"fork-server-{socket.gethostname()}.log").read_text()


def test_a_server_that_dies_takes_its_ranks_along_and_another_one_follows(tmp_path: Path) -> None:
    """They count as killed; the next attempt's ranks come from a new server."""
    spec = spec_of(tmp_path, SLEEPS)
    with closing(RankStarter()) as starter:
        for attempt in range(2):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            ranks = RankGroup(spec, folder, Share(world_size=2, ranks=2, port=1), starter)
            pids = ranks.pids
            (server,) = children("fork.server")
            server.kill()
            wait_until(ranks.all_exited, what="the ranks' end")
            assert [failure.code for failure in ranks.failures()] == [-signal.SIGKILL] * 2
            ranks.end()
            assert not any(map(runs, pids))


@pytest.mark.parametrize(
    ("customized", "kind", "code"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "", 3),
        (
            "import os\ndef fork():\n    raise BlockingIOError(11, 'no more processes')\nos.fork = fork",
            "TrainingFailed",
            1,
        ),
    ],
    ids=["thread", "no processes"],
)
def test_a_server_that_cannot_fork(tmp_path: Path, customized: str, kind: str, code: int) -> None:
    """Beside a library's thread ranks are spawned, and end as they do; a rank whose fork fails has failed, and says of what."""
    (tmp_path / "sitecustomize.py").write_text(customized)
    spec = spec_of(tmp_path, "import signal, sys\nsys.exit(3)", env={"PYTHONPATH": str(tmp_path)})
    with started(spec, tmp_path, ranks=2) as ranks:
        wait_until(ranks.all_exited, what="the ranks' end")
        assert [(failure.kind, failure.code) for failure in ranks.failures()] == [(kind, code)] * 2
        assert ("no more processes" in ranks.failures()[0].message) == bool(kind)
        assert all(ranks.pids) != bool(kind)
        assert ("is spawned" in (tmp_path / "r" / f"fork-server-{socket.gethostname()}.log").read_text()) != bool(kind)


def test_a_rank_that_cannot_be_started_has_failed(tmp_path: Path) -> None:
    """Its siblings are ended with it: nothing is left behind, and the failure says what the system said."""
    spec = spec_of(tmp_path, SLEEPS)

    def second_fails(spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
        if place["RANK"] == "1":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return spawn_rank(spec, place, log)

    ranks = RankGroup(spec, tmp_path, Share(world_size=3, ranks=3, port=1), second_fails)
    (failure,) = ranks.failures()
    assert (failure.rank, failure.kind) == (1, "TrainingFailed")
    assert "Resource temporarily unavailable" in failure.message
    pids = ranks.pids
    ranks.end()
    ranks.end()
    assert pids[1] == 0
    assert not any(map(runs, pids))


def test_an_error_while_ranks_are_started_leaves_none(tmp_path: Path) -> None:
    """Whatever it is, interrupts among them."""
    spec, begun = spec_of(tmp_path, SLEEPS), []

    def interrupted(spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
        if place["RANK"] == "1":
            raise KeyboardInterrupt
        begun.append(spawn_rank(spec, place, log))
        return begun[0]

    with pytest.raises(KeyboardInterrupt):
        RankGroup(spec, tmp_path, Share(world_size=2, ranks=2, port=1), interrupted)
    assert begun[0].poll() == -signal.SIGKILL
    assert children("undertaker") == []


class Held:
    """A rank that the kernel does not let go."""

    pid = 4242
    started = True

    def poll(self) -> None:
        """It runs."""

    def reason(self) -> dict[str, Any]:
        """It has started."""
        return {}

    def gone(self, within_s: float) -> bool:
        """It never is."""
        return False

    def signal(self, number: signal.Signals) -> None:
        """It hears nothing."""


def test_a_rank_that_cannot_be_killed_ends_the_run_with_its_process_named(tmp_path: Path) -> None:
    """Nobody waits for it without an end, and another attempt beside it would meet the same device."""
    ranks = RankGroup(spec_of(tmp_path, SLEEPS), tmp_path, Share(world_size=1, ranks=1, port=1), lambda *_: Held())
    with pytest.raises(TrainingFailed, match="4242"):
        ranks.end()


def test_a_server_that_is_stopped_keeps_nobody_from_ending_its_ranks(tmp_path: Path) -> None:
    """It cannot say that a rank has ended, and is ended itself."""
    with closing(RankStarter()) as starter:
        rank = starter(
            spec_of(tmp_path, SLEEPS), {"RANK": "0", "WORLD_SIZE": "1", "DLAC_LAUNCH": str(tmp_path)}, tmp_path / "log"
        )
        pid = rank.pid
        (server,) = children("fork.server")
        server.suspend()
        rank.signal(signal.SIGKILL)
        assert rank.gone(0.2)
        assert not server.is_running()
        assert not runs(pid)


SUPERVISOR = """
import sys, time
from pathlib import Path
from dlac_pipeline.ranks.group import RankGroup
from dlac_pipeline.ranks.share import Share
from dlac_pipeline.ranks.starter import RankStarter
from dlac_pipeline.spec import parse_spec
import json
spec = parse_spec(json.loads(sys.argv[1]), origin="the test")
group = RankGroup(spec, Path(sys.argv[2]), Share(world_size=1, ranks=1, port=1), RankStarter())
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "60"])
Path(__file__).with_name("child").write_text(str(child.pid))
time.sleep(60)
"""


def test_what_a_rank_has_started_dies_with_a_supervisor_that_never_asked_who_it_is(tmp_path: Path) -> None:
    """The undertaker finds the ranks in the launch folder, so also before the claim, and those of a rehearsal."""
    spec = spec_of(tmp_path, PARENT)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, spec.model_dump_json(), str(tmp_path)])
    file = tmp_path / "child"
    wait_until(lambda: file.exists() and bool(file.read_text()), what="the rank's child")
    child = int(file.read_text())
    assert os.getpgid(child) == pid_of(tmp_path, 0)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not runs(child), what="the child's end", within_s=40)  # by itself it ends later


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    """Most real-time signals have none."""
    assert str(Exit(rank=3, code=-40)) == "rank 3 was killed by signal 40"
    assert str(Exit(rank=3, code=-9)) == "rank 3 was killed by SIGKILL"
