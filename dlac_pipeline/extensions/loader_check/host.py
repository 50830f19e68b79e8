"""Process of a loader: `python -m dlac_pipeline.extensions.loader_check.host LOADER`, a file or a module.

It imports the loader's packages once and forks one process per rank and launch, so that a launch costs no import. They
share its seed of hashes, and the effects of the loader's import. At its start it writes the loader's abilities, and then one
answer for each JSON command that it reads:

    -> {"versions": ..., "not_offered": ..., "shared_state": ..., "notes": ..., "converts": ...}, or {"failed": text}
    {"do": "convert", "jobs": [one], "limit_s": s} -> {"ranks": [{"exit": 0, "result": {"bytes": n, "seconds": s}}]}
    {"do": "consume", "jobs": [...], "limit_s": s} -> {"ranks": [{"exit": 0 or -signal, "result": ..., "error": text}]}

Ranks of a launch run at the same time, with the environment variables that torchrun sets. All of their processes have ended
before its answer, except processes in another session or group: each rank leads a process group, which is killed.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dlac_pipeline.extensions.loader_check.consume import Misuse, consume
from dlac_pipeline.extensions.loader_check.protocol import Job

GRACE_S = 5.0  # for the other ranks after a failure
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer commands until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library is no answer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after the ranks were ended
    try:
        module = _import(sys.argv[1])
    except (Exception, SystemExit) as err:
        print(json.dumps({"failed": _error_line(err, sys.argv[1])}), file=answers)
        return
    print(json.dumps(_described(module)), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        jobs = [Job(**job) for job in command["jobs"]]
        act = _convert if command["do"] == "convert" else consume
        print(json.dumps({"ranks": launch_ranks(module, act, jobs, command["limit_s"])}), file=answers)


def _import(source: str) -> ModuleType:
    """Import a file as a script is run: modules beside it can be imported, and so can itself, by workers that are spawned."""
    path = Path(source)
    if path.suffix == ".py":
        sys.path.insert(0, str(path.parent))
        sys.dont_write_bytecode = True  # in the user's folder
        source = path.stem
    module = importlib.import_module(source)
    if path.suffix == ".py" and module.__file__ != str(path):
        raise Misuse(f"expected {path.name} to be the module {source!r}, found {module.__file__}: rename your file")
    if not callable(getattr(module, "open_loader", None)):
        advice = "see `dlac check-loader --example`"
        raise Misuse(f"expected {path.name} to define open_loader(job, state), found no such function: {advice}")
    if not isinstance(not_offered := getattr(module, "NOT_OFFERED", {}), dict):
        found = type(not_offered).__name__
        raise Misuse(f"expected NOT_OFFERED of {path.name} to be a dict, from a scenario to a reason, found {found}")
    return module


def _described(module: ModuleType) -> dict[str, Any]:
    return {
        "versions": {name: importlib.metadata.version(name) for name in getattr(module, "PACKAGES", [])},
        "not_offered": getattr(module, "NOT_OFFERED", {}),
        "shared_state": getattr(module, "SHARED_STATE", False),
        "notes": getattr(module, "NOTES", []),
        "converts": hasattr(module, "convert"),
    }


def _convert(module: ModuleType, job: Job) -> dict[str, Any]:
    begun = time.perf_counter()
    shutil.rmtree(job.own_format, ignore_errors=True)
    written = module.convert(job)
    return {"bytes": written, "seconds": time.perf_counter() - begun}


def launch_ranks(
    module: ModuleType, act: Callable[[ModuleType, Job], dict[str, Any]], jobs: list[Job], limit_s: float
) -> list[dict[str, Any]]:
    """Fork the ranks, wait for them, and end all processes."""
    port = _free_port()
    pids = [_fork(module, act, job, port) for job in jobs]
    exits: dict[int, int] = {}
    until = time.monotonic() + limit_s
    failed_at = 0.0
    try:
        while len(exits) < len(pids) and time.monotonic() < until:
            for pid in pids:
                # Not reaped yet, so that no other process gets the number of its group.
                if pid not in exits and (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                    exits[pid] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if not failed_at and any(
                exits[pid] != job.exit_status for pid, job in zip(pids, jobs, strict=True) if pid in exits
            ):
                failed_at = time.monotonic()
                until = min(until, failed_at + GRACE_S)
            time.sleep(0.002)
    finally:
        for pid in pids:
            for kill in (os.killpg, os.kill):  # it may not lead its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [_outcome(job, exits.get(pid), limit_s) for pid, job in zip(pids, jobs, strict=True)]


def _fork(module: ModuleType, act: Callable[[ModuleType, Job], dict[str, Any]], job: Job, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        errors = os.open(f"{job.log}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.environ |= {
            "WORLD_SIZE": str(job.world_size),
            "RANK": str(job.rank),
            "GLOBAL_RANK": str(job.rank),
            "LOCAL_RANK": str(job.rank),
            "LOCAL_WORLD_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        Path(f"{job.log}.json").write_text(json.dumps(act(module, job)))
        code = 0
    except BaseException as err:
        traceback.print_exc()
        Path(f"{job.log}.json").write_text(json.dumps({"error": _error_line(err, str(module.__file__))}))
    finally:
        os._exit(code)  # no clean-up of the parent's objects in a fork


def _error_line(err: BaseException, source: str) -> str:
    """Return the error in one line, with its line in the loader. torch passes on a worker's error with its whole traceback."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()] or [""]
    if isinstance(err, Misuse):
        return lines[0]
    line = lines[-1] if "Traceback" in str(err) else f"{type(err).__name__}: {lines[0]}".removesuffix(": ")
    places = re.findall(rf'File "{re.escape(source)}", line (\d+)', "".join(traceback.format_exception(err)))
    return f"{Path(source).name}:{places[-1]}: {line}" if places else line


def _outcome(job: Job, code: int | None, limit_s: float) -> dict[str, Any]:
    path = Path(f"{job.log}.json")
    result = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    if code is None:
        return {"exit": None, "error": f"rank {job.rank} did not end within {limit_s:g} s or after another failed"}
    return {"exit": code, "error": result.pop("error", None), "result": result}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
