"""Process of one rank: it ends with its supervisor, runs the training script as `__main__`, and records why that failed."""

import atexit
import faulthandler
import fcntl
import json
import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

from dlac_pipeline.elastic.ranks.launch_folder import log_file, pid_file, reason_file
from dlac_pipeline.elastic.ranks.script_errors import describe_exception, text_of
from dlac_pipeline.elastic.ranks.this_process import this_process
from dlac_pipeline.lakehouse.errors import DlacError, ScriptInvalid, error_kind
from dlac_pipeline.lakehouse.masking import mask_secrets, mask_setting, note_secrets

RUN_VARIABLE = "DLAC_RUN"
"""Variable with the name of the run, for tools that list processes."""
LAUNCH_VARIABLE = "DLAC_LAUNCH"
"""Variable with the launch folder, which the launcher sets for every rank."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a launch. Tools that end whole process trees send them to every process."""
_OWN_PACKAGES = ("dlac_pipeline",)
_INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a script that a keyboard interrupt ended, as shells report it."""
RESERVED_BYTES = 16 * 1024
_RECORDED = "_dlac_recorded"
"""Attribute of an exception that was recorded: a second record would have a later time, and the first rank to fail is blamed."""


if "--multiprocessing-fork" in sys.orig_argv:
    getproctitle()  # it finds the place of the title only before the environment is changed


@contextmanager
def held_signals() -> Iterator[None]:
    """Block the signals that end a launch in processes that are started inside. A rank unblocks them before its script.

    The fork server never unblocks them: it must outlive such a signal, because the ranks commit a checkpoint then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing this process's main module in a process that is started inside."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def main(environment: Mapping[str, str], binding: str, device: int, script: str, *arguments: str) -> NoReturn:
    """Run the training script, in a process of `multiprocessing`. `environment` names the rank.

    `binding` is how the rank is bound to the processors of its device, or empty.
    """
    os.environ.update(environment)
    try:
        _prepare(script, arguments)
        if binding:
            _bind(binding, device)
    except Exception as err:
        _print_to_log(traceback.format_exc())
        with suppress(OSError):
            leave_reason(err)
        sys.exit(1)
    code = _run(script)
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does before exit functions, which
    atexit._run_exitfuncs()  # multiprocessing leaves out
    sys.exit(code)


def _bind(binding: str, device: int) -> None:
    from torch.numa.binding import AffinityMode, NumaOptions, _maybe_apply_numa_binding_to_current_process

    options = NumaOptions(affinity_mode=AffinityMode(binding))
    _maybe_apply_numa_binding_to_current_process(gpu_index=device, numa_options=options)


def _prepare(script: str, arguments: tuple[str, ...]) -> None:
    folder, this = Path(os.environ[LAUNCH_VARIABLE]), this_process()
    rank = this.rank_of_all
    with suppress(PermissionError):  # it leads one already
        os.setpgid(0, 0)
    end_with_supervisor()
    with log_file(folder, rank).open("ab") as log, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # a signal such as SIGSEGV leaves no exception: the log gets the lines at which all threads were
    faulthandler.enable(2)
    of_group = "" if this.group is None else f" group {this.group}"
    setproctitle(f"dlac {os.environ[RUN_VARIABLE]}{of_group} rank {this.rank}/{this.world_size}")
    reason_file(folder, rank).write_bytes(b" " * RESERVED_BYTES)
    pid_file(folder, rank).write_text(str(os.getpid()))
    _be_a_new_python(script, arguments)


def end_with_supervisor() -> None:
    """Have the kernel kill this process group, hung or not, when the supervisor ends: their pipe breaks then. Linux only."""
    parent = parent_process()
    if parent is None or sys.platform != "linux":
        return
    pipe = int(parent.sentinel)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it has ended already
        os._exit(1)


def _be_a_new_python(script: str, arguments: tuple[str, ...]) -> None:
    """Give the script what it would find if Python had been started with it, also in a forked process."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    sys.argv = [script, *arguments]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(Path(script).parent), *(path for path in paths if path not in sys.path)]
    multiprocessing.set_start_method(None, force=True)  # else its processes start as this one was
    multiprocessing.current_process().name = "MainProcess"
    for descriptor in map(int, os.listdir("/proc/self/fd") if sys.platform == "linux" else ()):
        with suppress(OSError):  # the listing's own
            os.set_inheritable(descriptor, descriptor <= 2)
    _forget_shadowed(Path(script).parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def _forget_shadowed(folder: Path) -> None:
    """Forget libraries that were imported, and have the name of a module beside the script: the script is to find its own."""
    beside = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    for name in [name for name in sys.modules if name.partition(".")[0] in beside.difference(_OWN_PACKAGES)]:
        file = getattr(sys.modules[name], "__file__", None)
        if file and name != "__main__" and not Path(file).is_relative_to(folder):
            del sys.modules[name]


def _run(script: str) -> int:
    """Run the script and return its exit status. The reason of a failure is recorded."""
    try:
        if this_process().rank == 0:  # PyTorch would listen at every address
            from dlac_pipeline.elastic.ranks.process_group import serve_group_store

            serve_group_store()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        leave_reason(ended)
        if not isinstance(ended.code, int | None):
            _print_to_log(str(ended.code))
        return _status_of(ended)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as found:  # a cancelled task, or an exception class of the script's own, among them
        err = found
        # Every attempt meets a wrong script, unlike a missing module.
        if isinstance(found, SyntaxError) and found.filename == script:
            err = ScriptInvalid(
                f"expected a training script that can be run, found {type(found).__name__}: {found}: correct {script}"
            )
        leave_reason(err)
        _print_to_log(traceback.format_exc())
        return err.exit_code if isinstance(err, DlacError) else 1
    return 0


def _print_to_log(text: str) -> None:
    with suppress(OSError):  # the log may be on the disk that is full
        sys.stderr.write(mask_secrets(text).rstrip("\n") + "\n")
        sys.stderr.flush()


def leave_reason(err: BaseException) -> None:
    """Overwrite the reserved blanks, or an earlier record: this exception may be that the disk is full.

    A DLAC error is recorded under its public class, `sys.exit` with a status other than 0 without a class. An interrupt, which
    a person sends, is not recorded. Secrets of the job spec are masked, also if the script has not read it.
    """
    folder = Path(os.environ[LAUNCH_VARIABLE])
    with suppress(OSError, ValueError):
        note_secrets(json.loads((folder / "spec.json").read_text()))
    status = _status_of(err) if isinstance(err, SystemExit) else None
    if isinstance(err, KeyboardInterrupt | GeneratorExit) or status == 0 or hasattr(err, _RECORDED):
        return
    setattr(err, _RECORDED, True)
    reason = {"kind": "", "message": "", "detail": {"status": status}, "at": time.time(), **describe_exception(err)}
    if status is None:
        reason["kind"] = error_kind(err)
        reason["message"] = mask_secrets(text_of(err))[: RESERVED_BYTES // 8]
        detail = getattr(err, "detail", {}) if isinstance(err, DlacError) else {}  # that of others may be of any type
        reason["detail"] = mask_setting("", json.loads(json.dumps(detail, default=repr)))
    with reason_file(folder, this_process().rank_of_all).open("r+b") as stream:
        stream.write(_fit(reason).ljust(RESERVED_BYTES))


def _status_of(err: SystemExit) -> int:
    return err.code if isinstance(err.code, int) else 0 if err.code is None else 1


def _fit(reason: dict[str, Any]) -> bytes:
    """Return the record as JSON, with the end of the traceback only where all of it exceeds the reserved bytes."""
    while True:
        raw = json.dumps(reason, ensure_ascii=False, default=repr).encode(errors="replace")
        if len(raw) <= RESERVED_BYTES or not reason["traceback"]:
            return raw
        reason["traceback"] = reason["traceback"][len(reason["traceback"]) // 2 + 1 :]
