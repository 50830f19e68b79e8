"""The process of one rank: `python -m dlac_pipeline.ranks.rank SCRIPT ARGS...`, started by the launcher.

It dies with its supervisor, runs the training script as `__main__`, and leaves the reason behind when that fails.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from catalog.errors import DlacError, ScriptInvalid, TrainingFailed, name_of
from catalog.masking import mask_secrets, mask_setting
from dlac_pipeline.ranks.launch_folder import pid_file, reason_file
from dlac_pipeline.ranks.script_errors import describe_exception, text_of

RUN_VARIABLE = "DLAC_RUN"
"""Names the run, for whoever looks at processes."""
LAUNCH_VARIABLE = "DLAC_LAUNCH"
"""Names the launch folder; set by the launcher for every rank."""
SUPERVISOR_VARIABLE = "DLAC_SUPERVISOR_PID"
"""Names the process that a rank must not outlive."""
REHEARSAL_VARIABLE = "DLAC_REHEARSAL"
"""Set to 1 for the ranks of a rehearsal, for scripts with side effects."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What ends a launch. Whoever ends whole process trees sends them to every process of it."""
_PR_SET_PDEATHSIG = 1
_RESERVED_BYTES = 16 * 1024
_RECORDED = "_dlac_recorded"
"""Attribute of an exception that was recorded: a second record would have a later time, and the first rank to fail is blamed."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; leave at once if it is dead already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


@contextmanager
def held_signals() -> Iterator[None]:
    """A process that is started in here is born with the signals that end a launch held back, and answers none of them.

    For those between the supervisor and its ranks: they live as long as the supervisor, and are to outlive such a signal, for
    the ranks commit a checkpoint then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """Run the script named by the arguments."""
    die_with_parent(int(os.environ[SUPERVISOR_VARIABLE]))
    setproctitle(f"dlac {os.environ[RUN_VARIABLE]} rank {os.environ['RANK']}/{os.environ['WORLD_SIZE']}")
    _reason_file().write_bytes(b" " * _RESERVED_BYTES)
    pid_file(Path(os.environ[LAUNCH_VARIABLE]), int(os.environ["RANK"])).write_text(str(os.getpid()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)  # a forked rank had them held back: none was lost since
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        _serve_group_store()
        runpy.run_path(script, run_name="__main__")
    except Exception as found:
        err = _as_said(found, script)
        leave_reason(err)
        with suppress(OSError):  # the log may lie on the disk that is full
            traceback.print_exc()
            sys.stderr.flush()
        sys.exit(err.exit_code if isinstance(err, DlacError) else 1)
    except BaseException as ended:  # sys.exit, a cancelled task, or an exception class of the script's own
        leave_reason(ended)
        raise


def _serve_group_store() -> None:
    """Serve the store of the process group before the script may do so: PyTorch would listen at every address.

    A new Python that is the only rank does not import PyTorch for that ahead of its script.
    """
    if os.environ["RANK"] == "0" and (os.environ["WORLD_SIZE"] != "1" or "torch" in sys.modules):
        from dlac_pipeline.ranks.process_group import serve_group_store

        serve_group_store()


def _as_said(err: Exception, script: str) -> Exception:
    """The error of a script that ended with one; what every attempt would meet again, as that.

    A module that is missing is not: the file system that it lies on may be mounted later than the machine is back.
    """
    if not isinstance(err, SyntaxError) or err.filename != script:
        return err
    return ScriptInvalid(
        f"expected a training script that can be run, found {type(err).__name__}: {err}; mend {script}"
    )


def pid_of(launch: Path, rank: int) -> int:
    """The process of a rank, living or dead, for whoever looks at a launch from outside.

    Raises:
        FileNotFoundError: it has not begun yet.
    """
    return int(pid_file(launch, rank).read_text() or 0)


def _reason_file() -> Path:
    return reason_file(Path(os.environ[LAUNCH_VARIABLE]), int(os.environ["RANK"]))


def leave_reason(err: BaseException) -> None:
    """Overwrite the reserved blanks, or an earlier record: this exception may be that the disk is full.

    A DLAC error is recorded under its public class, `sys.exit` with a status other than 0 without a class. An interrupt, which
    a person sends, is not recorded.
    """
    if isinstance(err, KeyboardInterrupt | GeneratorExit) or (isinstance(err, SystemExit) and _status_of(err) == 0):
        return
    if hasattr(err, _RECORDED):
        return
    setattr(err, _RECORDED, True)
    exits = isinstance(err, SystemExit)
    reason = {
        "kind": "" if exits else name_of(err),
        "message": "" if exits else mask_secrets(text_of(err))[: _RESERVED_BYTES // 8],
        "detail": {"status": _status_of(err)} if isinstance(err, SystemExit) else _mask_detail(err),
        "at": time.time(),
        **describe_exception(err),
    }
    with _reason_file().open("r+b") as stream:
        stream.write(_fit(reason).ljust(_RESERVED_BYTES))


def _mask_detail(err: BaseException) -> Any:
    """Return the detail of an exception as plain JSON values without secrets."""
    return mask_setting("", json.loads(json.dumps(getattr(err, "detail", {}), default=repr)))


def _status_of(err: SystemExit) -> int:
    """Return the exit status that Python makes of it."""
    return err.code if isinstance(err.code, int) else 0 if err.code is None else 1


def _fit(reason: dict[str, Any]) -> bytes:
    """Return the record as JSON, with the end of the traceback only where all of it exceeds the reserved bytes."""
    while True:
        raw = json.dumps(reason, ensure_ascii=False, default=repr).encode(errors="replace")
        if len(raw) <= _RESERVED_BYTES or not reason["traceback"]:
            return raw
        reason["traceback"] = reason["traceback"][len(reason["traceback"]) // 2 + 1 :]


def reason_not_started(err: OSError) -> dict[str, Any]:
    """Why a rank never started, told as one that it has left behind."""
    found = f"expected to start a process for this rank, found {err}: see the limits on processes and memory"
    return {"kind": TrainingFailed.__name__, "message": found}


if __name__ == "__main__":
    main()
