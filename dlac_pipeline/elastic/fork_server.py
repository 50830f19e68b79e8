"""The fork server of this process: multiprocessing's, with ranks' imports made ahead. See docs/design/0011-nodes.md."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from dlac_pipeline.elastic.preload import PRELOAD_VARIABLE
from dlac_pipeline.elastic.ranks.environment import environment_of, set_environment
from dlac_pipeline.elastic.ranks.rank import held_signals
from dlac_pipeline.lakehouse.durable_io import make_folder_durably
from dlac_pipeline.lakehouse.errors import DlacError, ScriptInvalid, TrainingFailed
from dlac_pipeline.spec.job_spec import JobSpec

START_METHODS = {"fork": "forkserver", "spawn": "spawn"}
"""Start methods of multiprocessing by `launch.start`."""
_LOG_BYTES = 2**20
"""Size from which a log of earlier launches is started again."""
_ENDS_WITHIN_S = 5.0
_POLL_S = 0.01
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables that keep imports from beginning threads: OpenBLAS would, and so would CUDA's driver when it is asked for devices."""
_LOCK = threading.Lock()
_RUNNING: dict[str, object] = {}
"""Purpose of the running server, and its process id."""
_USERS: list[object] = []
"""Starts and ranks that need the server."""


def is_used(spec: JobSpec) -> bool:
    """Return whether the ranks of a job are forked."""
    return spec.launch.start == "fork"


def add_user(user: object) -> None:
    """Keep the server as it is for ranks that it has, or is about to have, until `remove_user`."""
    with _LOCK:
        _USERS.append(user)


def remove_user(user: object) -> None:
    """Undo `add_user`. A second call does nothing."""
    with _LOCK:
        if user in _USERS:
            _USERS.remove(user)


def start_server(spec: JobSpec) -> None:
    """Start the server for a job, unless one for the same job runs, or others use it. Raise `OSError` if it does not start."""
    if not is_used(spec):
        return
    wanted = {"environment": spec.launch.env, **_preload_of(spec)}
    with _LOCK:
        if is_alive() and (_RUNNING["for"] == wanted or len(_USERS) > 1):
            return
        _kill()
        log, problem = _files_of(spec)
        make_folder_durably(log.parent)  # as an attempt does, which the first launch of a run has not begun yet
        with open(log, "ab", opener=_open_own_log) as stream:
            if stream.tell() > _LOG_BYTES:
                stream.truncate(0)
        problem.unlink(missing_ok=True)
        multiprocessing.set_forkserver_preload(["dlac_pipeline.elastic.preload"])
        with held_signals():
            resource_tracker.ensure_running()  # it unblocks signals
        own = {**_NO_THREADS, PRELOAD_VARIABLE: json.dumps(_preload_of(spec))}
        with held_signals(), set_environment({**environment_of(spec), **own}):
            forkserver.ensure_running()
        _RUNNING.update({"for": wanted, "pid": _pid()})


def _open_own_log(path: str, flags: int) -> int:
    """Open a log that only this user can read, and no link to another file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def is_alive() -> bool:
    """Return True if the last started server runs. multiprocessing replaces a dead one by one that imports nothing."""
    pid = _pid()
    return pid is not None and pid == _RUNNING.get("pid") and not _has_ended(pid)


def end_server(*, only_user: object = None) -> None:
    """End the server, unless it serves ranks besides the ranks of `only_user`. Ranks that it has not started never start."""
    with _LOCK:
        if all(user is only_user for user in _USERS):
            _kill()


def why_gone(spec: JobSpec, *, within_s: float = 0.0) -> DlacError | None:
    """Return why the server has ended, which may take a moment. None: it runs, or is not used."""
    deadline = time.monotonic() + within_s
    while is_used(spec) and is_alive() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not is_used(spec) or is_alive():
        return None
    log, problem = _files_of(spec)
    with suppress(OSError):
        return ScriptInvalid(problem.read_text())  # another attempt would import the same
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


def log_of(spec: JobSpec) -> Path:
    """Return the file of the output of the server, and of the ranks that it forks until they have logs."""
    return Path(spec.checkpoint.local) / spec.run / f"fork-server-{socket.gethostname()}.log"


def _files_of(spec: JobSpec) -> tuple[Path, Path]:
    log = log_of(spec)
    return log, log.with_suffix(f".{os.getpid()}")


def _pid() -> int | None:
    """Return the process id of multiprocessing's server, or None if none was started."""
    return vars(forkserver._forkserver).get("_forkserver_pid")


def _kill() -> None:
    pid = _pid()
    if pid is None or _has_ended(pid):
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while not _has_ended(pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it to multiprocessing to ask how. Threads may outlive the main one."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
