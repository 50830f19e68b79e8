"""Ranks as processes: forked or spawned, signalled, ended, and reported if they cannot start. The scripts import nothing."""

import gc
import multiprocessing
import multiprocessing.spawn
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.rank_launcher import RankLauncher
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.ranks.launch_folder import log_file, pid_file
from dlac_pipeline.elastic.ranks.processes import HANG
from dlac_pipeline.spec import launch_spec
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks import local_ranks
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from tests.conftest import wait_until
from tests.forked import NEW_FORK_SERVER, Forked
from tests.small_records import small_spec

STARTS = ["fork", pytest.param("spawn", marks=pytest.mark.soak)]
SLEEPS = "import time\ntime.sleep(60)\n"
LEAVES = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path(__file__).with_name("left").touch()))
Path(__file__).with_name("ready").touch()
time.sleep(60)
"""
"""A rank that handles SIGTERM, like one that commits a checkpoint."""


def spec_of(folder: Path, script: str, **launch: Any) -> JobSpec:
    """Return a job with one script."""
    (folder / "script.py").write_text(script)
    return small_spec(
        lakehouse={"uri": "sqlite:///none.db", "warehouse": "file:///none"},
        order={"batch_size": 4, "key_groups": 4, "block_slices": 1, "seed": 1, "steps": 1},
        checkpoint={"store": str(folder), "local": str(folder)},
        launch={"script": str(folder / "script.py"), **launch},
    )


@contextmanager
def run_ranks(spec: JobSpec, folder: Path, ranks: int = 1) -> Iterator[RankGroup]:
    """Yield ranks of a job, started and ended as a supervisor does."""
    with closing(RankStarter()) as starter:
        local_ranks = starter.start(spec, folder, Share(world_size=ranks, ranks=ranks, port=free_port()))
        try:
            yield local_ranks
        finally:
            local_ranks.end()


def delaying_environment(folder: Path) -> dict[str, str]:
    """Return variables that delay every new Python process."""
    (folder / "sitecustomize.py").write_text(SLEEPS)
    return {"PYTHONPATH": str(folder)}


def children(name: str) -> list[psutil.Process]:
    """Return this process's living children of a name. An earlier test may have left a zombie."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may end now
            while child.status() != psutil.STATUS_ZOMBIE and not child.cmdline():
                time.sleep(0.01)  # the kernel has not loaded its program yet
            if child.status() != psutil.STATUS_ZOMBIE and re.search(name, " ".join(child.cmdline())):
                found.append(child)
    return found


def runs(pid: int) -> bool:
    """Return whether a process runs. 0 is no process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("start", STARTS)
def test_signals_to_all_reach_ranks(tmp_path: Path, start: str) -> None:
    """A signal to the process tree reaches the fork server too. The ranks still exit in order."""
    with run_ranks(spec_of(tmp_path, LEAVES, start=start), tmp_path) as ranks:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            for process in children("fork.?server"):  # the ranks are starting
                process.send_signal(number)
        wait_until(lambda: (tmp_path / "ready").exists() or bool(ranks.failures()), what="the script")
        wait_until(lambda: ranks.processes.is_started, what="the thread that starts the ranks")  # a stop would abort it
        assert ranks.failures() == []
        between = children("fork.?server")
        assert len(between) == (start == "fork")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            for process in between:
                process.send_signal(number)
        ranks.request_stop()
        wait_until(ranks.all_exited, what="the rank's end")
        assert (ranks.failures(), (tmp_path / "left").exists()) == ([], True)
        assert all(map(runs, [process.pid for process in between]))


@pytest.mark.parametrize("start", STARTS)
def test_log_of_rank_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    """Its last lines stay, and so does the record of its exception, whether the rank was forked or spawned."""
    monkeypatch.setattr(local_ranks, "MOST_LOG_BYTES", 2**20)
    script = "import os\nfor _ in range(300):\n    os.write(1, b'x' * 10**5 + b'\\n')\nraise ValueError('the end')"
    with run_ranks(spec_of(tmp_path, script, start=start), tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        (failure,) = ranks.failures()
    assert (failure.kind, failure.origin) == ("ValueError", "script")
    assert failure.where.endswith(":4 in <module>")
    assert log_file(tmp_path, 0).stat().st_size <= 2**20
    assert ranks.log_end(0)["log_tail"].endswith("ValueError: the end")


@pytest.mark.parametrize("start", STARTS)
def test_crash_leaves_its_line(tmp_path: Path, start: str) -> None:
    """A library that kills its process by a signal raises no exception. The log of the rank has the line of the script."""
    script = "import os\ndef crash():\n    os.abort()\ncrash()"
    with run_ranks(spec_of(tmp_path, script, start=start), tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        (failure,) = ranks.failures()
    assert failure.code == -signal.SIGABRT
    assert 'script.py", line 3 in crash' in log_file(tmp_path, 0).read_text()


@pytest.mark.soak
def test_silent_server_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for a silent server are a hang after the start timeout."""
    monkeypatch.setenv(NEW_FORK_SERVER, "yes")  # one that is forked may have started the ranks already
    monkeypatch.setattr(launch_spec, "LEAST_START_S", 1.0)
    spec = spec_of(tmp_path, SLEEPS, hang_timeout_s=0.1, env=delaying_environment(tmp_path))
    began = time.monotonic()
    with run_ranks(spec, tmp_path, ranks=2) as ranks:
        wait_until(lambda: bool(children("fork.?server")), what="the server")
        children("fork.?server")[0].suspend()
        assert ranks.processes.pids == [0, 0]
        assert time.monotonic() - began >= 1.0
        assert [failure.kind for failure in ranks.failures()] == [HANG, HANG]
    assert children("fork.?server") == []


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='flusher').start()"


@pytest.mark.parametrize(("answer", "is_forked"), [(3, True), (0, False)], ids=["uninitialized", "initialized"])
def test_opened_driver_is_not_forked(tmp_path: Path, answer: int, is_forked: bool) -> None:
    """A stand-in for CUDA's driver answers 3 until it is initialized. NVML has a thread. Nothing asks for devices."""
    (tmp_path / "driver.c").write_text(f"int cuDeviceGetCount(int *count) {{ return {answer}; }}\n")
    library = tmp_path / "libcuda.so.1"
    source = str(tmp_path / "driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), source], check=True)
    (tmp_path / "own_library.py").write_text(
        f"import ctypes, os, torch\nctypes.CDLL({str(library)!r})\n{THREAD}\n"
        "task = threading.enumerate()[-1].native_id\n"
        "open(f'/proc/self/task/{task}/comm', 'w').write('cuda00001800007')\n"
        "def ask():\n    os._exit(9)\n"
        "torch.accelerator.is_available = torch.cuda.is_available = ask\n"
    )
    (tmp_path / "other_library.py").touch()
    script = "import os, sys\nsys.exit(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] != '1')"
    with run_ranks(spec_of(tmp_path, script, preload=["own_library", "other_library"]), tmp_path, ranks=1) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        failures = ranks.failures()
    assert ["it opened the accelerator" in failure.message for failure in failures] == [True] * (not is_forked)


def test_slow_process_outlives_start_of_next(tmp_path: Path) -> None:
    """Replica groups start one after another. A loaded node forks a rank long before that rank reads its arguments."""
    (tmp_path / "slow_library.py").write_text(
        "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(1))\n"
    )
    spec = spec_of(tmp_path, "pass", preload=["slow_library"])
    fork_server.start_server(spec)
    launcher = RankLauncher()
    try:
        started: list[BaseProcess] = []
        for _ in range(2):
            share = Share(world_size=1, ranks=1, port=free_port())
            started += launcher.start_processes(spec, tmp_path, share).values()
            gc.collect()
        for process in started:
            process.join(30)
        assert [process.exitcode for process in started] == [0, 0]
    finally:
        fork_server.end_server()


def test_rank_without_log_shows_that_of_server(tmp_path: Path) -> None:
    """A rank that dies between its fork and its script has written into the fork server's log."""
    (tmp_path / "own_library.py").write_text(
        "import os, time\n"  # the other process writes to it first
        "end = lambda: (time.sleep(0.5), os.write(2, b'no semaphore'), os._exit(1))\n"
        "os.register_at_fork(after_in_child=end)\n"
    )
    folder = tmp_path / "launch"
    folder.mkdir()
    with run_ranks(spec_of(tmp_path, "pass", preload=["own_library"]), folder) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        assert [str(failure) for failure in ranks.failures()] == ["rank 0 died with exit status 1"]
        end = ranks.log_end(0)
    assert end["log_tail"].splitlines()[-1] == "no semaphore"
    assert Path(end["log"]).name.startswith("fork-server-")


def test_dead_server_ends_attempt(tmp_path: Path) -> None:
    """The failure reports that the endings of its ranks are unknown. A new server starts the next attempt's ranks."""
    spec = spec_of(tmp_path, SLEEPS)
    with closing(RankStarter()) as starter:
        for attempt in range(2):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            ranks = starter.start(spec, folder, Share(world_size=2, ranks=2, port=free_port()))
            pids = ranks.processes.pids
            (server,) = children("fork.?server")
            server.kill()
            wait_until(ranks.all_exited, what="the ranks' end")
            assert [failure.kind for failure in ranks.failures()] == ["TrainingFailed"] * 2
            ranks.end()
            assert not any(map(runs, pids))


def test_unstartable_ranks_have_failed(tmp_path: Path) -> None:
    """The Python to start does not exist."""
    python = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(tmp_path / "python"))
    try:
        with run_ranks(spec_of(tmp_path, SLEEPS, start="spawn"), tmp_path, ranks=2) as ranks:
            wait_until(ranks.all_exited, what="that it is known")
            assert [failure.rank for failure in ranks.failures()] == [0, 1]
    finally:
        multiprocessing.set_executable(python)


ENDS = """
import atexit, os, sys, threading, time
from pathlib import Path
rank = os.environ["RANK"]
ended = Path(__file__).with_name(f"ended-{rank}")
atexit.register(lambda: ended.write_text(ended.read_text() + " exit"))
threading.Thread(target=lambda: (time.sleep(0.2), ended.write_text("thread"))).start()
"""


@pytest.mark.parametrize("start", STARTS)
def test_scripts_end_as_in_python(tmp_path: Path, start: str) -> None:
    """The rank waits for the threads of its script and runs its exit functions. Its exit status is the script's."""
    ends = {"pass": 0, "sys.exit()": 0, "sys.exit(7)": 7, "sys.exit('why')": 1}
    with run_ranks(spec_of(tmp_path, f"{ENDS}exec({list(ends)}[int(rank)])", start=start), tmp_path, ranks=4) as ranks:
        wait_until(ranks.all_exited, what="the end of the ranks")
        failed = {failure.rank: failure.code for failure in ranks.failures()}
        assert failed == {rank: code for rank, code in enumerate(ends.values()) if code}, ranks.log_end(0)
        assert ["why" in ranks.log_end(rank)["log_tail"] for rank in range(4)] == [False] * 3 + [True]
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(4)] == ["thread exit"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_scripts_start_as_in_python(tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, PYTHONPATH, modules beside the script, standard input and child processes are as without DLAC."""
    (tmp_path / "tenacity.py").write_text("own = True")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "own_library.py").touch()
    monkeypatch.setenv(NEW_FORK_SERVER, "yes")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    script = """
import multiprocessing, os, sys, own_library, tenacity
assert tenacity.own
assert sys.argv[1:] == ["${local_rank}", "$$", "--x=$HOME"], sys.argv
assert sys.modules["__main__"].__file__ == sys.argv[0]
found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OWN")]
assert found == ["0", "1", "127.0.0.1", "value"], found
assert multiprocessing.get_start_method(allow_none=True) is None
assert multiprocessing.current_process().name == "MainProcess"
assert os.read(0, 1) == b""
"""
    environment = {"PYTHONPATH": str(tmp_path / "library"), "OWN": "value", "RANK": "7"}
    spec = spec_of(tmp_path, script, start=start, args=["${local_rank}", "$$", "--x=$HOME"], env=environment)
    with run_ranks(spec, tmp_path) as ranks:
        wait_until(ranks.all_exited, what="the rank's end")
        assert ranks.failures() == [], ranks.log_end(0)


@pytest.mark.parametrize("start", STARTS)
def test_stop_during_start_starts_nothing(tmp_path: Path, start: str) -> None:
    """No rank starts after the end of its group, and the stop does not wait for imports."""
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(1)")
    script = "from pathlib import Path\nPath(__file__).with_name('began').touch()"
    with run_ranks(spec_of(tmp_path, script, start=start, preload=["slow_library"]), tmp_path, ranks=2) as ranks:
        ranks.request_stop()
        assert ranks.all_exited()
        assert [failure.code for failure in ranks.failures()] == [-signal.SIGTERM] * 2
    time.sleep(1.5)
    assert not (tmp_path / "began").exists()
    assert children("dlac r rank") == children("fork.?server") == []


SUPERVISOR = """
import json, sys, time
from pathlib import Path
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.spec.job_spec import parse_spec
spec = parse_spec(json.loads(sys.argv[1]), origin="the test")
group = RankStarter().start(spec, Path(sys.argv[2]), Share(world_size=1, ranks=1, port=free_port()))
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "60"])
Path(__file__).with_name("child").write_text(str(child.pid))
time.sleep(60)
"""


@pytest.mark.parametrize("start", STARTS)
def test_everything_ends_with_supervisor(tmp_path: Path, start: str) -> None:
    """A suspended rank, its processes and the fork server end with their supervisor, whose script the ranks do not run."""
    spec = spec_of(tmp_path, PARENT, start=start)
    (tmp_path / "supervisor.py").write_text(SUPERVISOR)
    supervisor = Forked([sys.executable, str(tmp_path / "supervisor.py"), spec.model_dump_json(), str(tmp_path)])
    file = tmp_path / "child"
    wait_until(lambda: file.exists() and bool(file.read_text()), what="the rank's child")
    child, rank = int(file.read_text()), int(pid_file(tmp_path, 0).read_text())
    others = [process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)]
    assert len(others) == {"fork": 4, "spawn": 3}[start]
    assert os.getpgid(child) == rank
    os.kill(rank, signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    for pid in (rank, child, *others):
        wait_until(lambda pid=pid: not runs(pid), what="its end", within_s=40)  # type: ignore[misc]  # its sleep is longer
