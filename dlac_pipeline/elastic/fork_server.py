"""The fork server of this process: multiprocessing's, with what ranks import imported ahead (`preload.py`).

One server serves all attempts of a supervisor. It starts beside the supervisor's own imports. Without PyTorch: the supervisor
imports that while the server does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from catalog.errors import TrainingFailed
from dlac_pipeline.elastic.preload import PRELOAD_VARIABLE
from dlac_pipeline.ranks.environment import environment_of, set_environment
from dlac_pipeline.ranks.rank import held_signals
from dlac_pipeline.spec import JobSpec

_LOG_BYTES = 2**20
"""Size from which a log of earlier launches is begun anew."""
_ENDS_WITHIN_S = 5.0
_POLL_S = 0.01
_LOCK = threading.Lock()
_RUNNING: dict[str, object] = {}
"""What the running server has imported, and in which environment."""


def is_used(spec: JobSpec) -> bool:
    """Return whether the ranks of a job are forked."""
    return spec.launch.start == "fork"


def start_server(spec: JobSpec) -> None:
    """Start the server for a job, unless one runs that was started for the same, or that has ranks.

    Raises:
        OSError: it cannot be started.
    """
    if not is_used(spec):
        return
    environment = environment_of_server(spec)
    wanted = {"environment": spec.launch.env, **_preload_of(spec)}
    with _LOCK:
        if _processes() and (wanted == _RUNNING or multiprocessing.active_children()):
            return
        end_server()
        _prepare_files(spec)
        _RUNNING.update(wanted)
        multiprocessing.set_forkserver_preload(["dlac_pipeline.elastic.preload"])
        with held_signals():
            resource_tracker.ensure_running()  # it unblocks signals
        with held_signals(), set_environment(environment):
            forkserver.ensure_running()


def environment_of_server(spec: JobSpec) -> dict[str, str]:
    """Return the environment of the server for a job. Whoever starts ranks sets it: multiprocessing replaces a dead server."""
    # OpenBLAS would begin threads at import.
    return {"OPENBLAS_NUM_THREADS": "1", **environment_of(spec), PRELOAD_VARIABLE: json.dumps(_preload_of(spec))}


def end_idle_server() -> None:
    """End the server unless it has ranks: those of another supervisor in this process."""
    with _LOCK:
        if not multiprocessing.active_children():
            end_server()


def end_server() -> None:
    """End the server; ranks that it has not started never are."""
    found = _processes()
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while not all(_has_ended(process.pid) for process in found) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def why_gone(spec: JobSpec) -> TrainingFailed | None:
    """Return why the server has ended; None: it runs, or is not used."""
    if not is_used(spec) or _processes():
        return None
    log, problem = _files_of(spec)
    with suppress(OSError):
        return TrainingFailed(problem.read_text())
    return TrainingFailed(f"expected a fork server to start the ranks, found that it ended: its log is {log}")


def _preload_of(spec: JobSpec) -> dict[str, str | list[str]]:
    log, problem = _files_of(spec)
    return {
        "title": f"dlac {spec.run} fork server",
        "log": str(log),
        "problem": str(problem),
        "folder": str(Path(spec.launch.script).parent),
        "modules": spec.launch.preload,
    }


def _prepare_files(spec: JobSpec) -> None:
    log, problem = _files_of(spec)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as stream:
        if stream.tell() > _LOG_BYTES:
            stream.truncate(0)
    problem.unlink(missing_ok=True)


def _files_of(spec: JobSpec) -> tuple[Path, Path]:
    log = Path(spec.checkpoint.local) / spec.run / f"fork-server-{socket.gethostname()}.log"
    return log, log.with_suffix(f".{os.getpid()}")


def _processes() -> list[psutil.Process]:
    """Return the servers of this process: one, or none."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if re.search("fork.?server", " ".join(child.cmdline())) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it to multiprocessing to ask how. Threads may outlive the main one."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
