"""Programs that tests start without their imports: each is forked from a process that has imported the libraries.

`Forked` is used like `subprocess.Popen`, for a Python command. The program is a separate process: with its own arguments,
environment, streams and session, and with the test as its parent. A test about imports, or about the interpreter's options,
starts a new Python.

multiprocessing's fork server, which imports everything again for each supervisor, is forked in the same way: in this process
after `fork_the_fork_server`, and in programs that were forked. With NEW_FORK_SERVER in the environment it is a new Python.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from dlac_pipeline.elastic.preload import PRELOAD_VARIABLE

_IMPORTS = (
    *("torch.distributed.checkpoint.state_dict", "torch._dynamo", "dlac_pipeline.train.training_run"),
    *("dlac_pipeline.extensions.dataset", "dlac_pipeline.elastic.rank_launcher"),
    *("dlac_pipeline.extensions.clusters.serve", "dlac_pipeline.cli.main"),
)
NEW_FORK_SERVER = "TESTS_NEW_FORK_SERVER"
MORE_IMPORTS = "TESTS_MORE_IMPORTS"
"""Environment variable with further modules, as a,b, that the process that forks imports."""
_PRELOAD = "dlac_pipeline.elastic.preload"
_PR_SET_CHILD_SUBREAPER = 36
_LOCK = threading.Lock()
_LEFT: list[object] = []
"""Streams of the program that a fork server was forked from. To end them needs locks that no thread releases here."""


class Forked(subprocess.Popen[Any]):
    """A program of Python, forked. Arguments that name options of the interpreter other than -c and -m are not supported."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        """Replace Popen's method. Some arguments in `rest` are used."""
        cwd, env = rest[4:6]
        stdin_end, _, _, stdout_end, _, stderr_end = rest[9:15]
        streams = [
            own if own != -1 else shared
            for own, shared in zip((stdin_end, stdout_end, stderr_end), range(3), strict=True)
        ]
        self.pid = _fork(_request([*map(os.fspath, args)], env=env, cwd=cwd, new_session=rest[20]), streams)
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]  # Popen's own, without a type


def fork_the_fork_server() -> None:
    """Let multiprocessing start its fork server in this process as a forked program."""
    multiprocessing.util.spawnv_passfds = _fork_apart


def _request(
    arguments: list[str], *, env: Mapping[str, str] | None, cwd: str | None, new_session: bool
) -> dict[str, Any]:
    return {
        "arguments": arguments[1:] if arguments[0] == sys.executable else arguments,
        "environment": dict(os.environ if env is None else env),
        "folder": os.fspath(cwd or Path.cwd()),
        "new_session": new_session,
    }


def _fork(request: dict[str, Any], streams: list[int]) -> int:
    """Fork a program with these files as 0, 1, 2 and so on, and return its process id. Its parent is this process."""
    with _LOCK:
        _adopt_orphans(True)
        try:
            server = _server()
            socket.send_fds(server, [json.dumps(request).encode()], streams)
            return int(server.recv(100))
        finally:
            _adopt_orphans(False)


_spawn = multiprocessing.util.spawnv_passfds


def _is_fork_server(arguments: Sequence[Any]) -> bool:
    return "multiprocessing.forkserver" in arguments[-1] and NEW_FORK_SERVER not in os.environ


def _fork_apart(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start multiprocessing's fork server, or another program of it. Replaces `multiprocessing.util.spawnv_passfds`."""
    if not _is_fork_server(args):
        return _spawn(path, args, passfds)
    request = _request([sys.executable, *args[-2:]], env=None, cwd=None, new_session=False)
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    return _fork({**request, "files": list(passfds), "blocked": blocked}, [0, 1, 2, *passfds])


def _fork_here(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Do as `_fork_apart` in a program that was forked itself, unless a library has begun threads since.

    A supervisor has started three threads by then. They may hold the locks of its streams, and no others.
    """
    if not _is_fork_server(args) or not len(os.listdir("/proc/self/task")) == threading.active_count() <= 4:
        return _spawn(path, args, passfds)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for file in sorted(int(name) for name in os.listdir("/proc/self/fd")):
            if file > 2 and file not in passfds:
                with suppress(OSError):
                    os.close(file)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, signal.Handlers | type(signal.default_int_handler)):
                signal.signal(number, signal.SIG_DFL)
        _LEFT.extend((sys.stdin, sys.stdout, sys.stderr))
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), *(open(file, "w", closefd=False) for file in (1, 2))  # noqa: SIM115
        sys.modules.pop(_PRELOAD, None)  # it imports for each server
        multiprocessing.forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # the caller holds it
        os._exit(_status_of(lambda: _run(list(args[-2:]))))
    return pid


def _adopt_orphans(yes: bool) -> None:
    """Become the parent of orphaned grandchildren, or stop it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


@cache
def _server() -> socket.socket:
    """Start the process that forks, once. It ends with this one."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(120)
    # Neither OpenMP nor OpenBLAS may begin threads before the fork.
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "tests.forked", str(its.fileno())]
    environment = {name: value for name, value in os.environ.items() if name != PRELOAD_VARIABLE}
    process = subprocess.Popen(command, env={**environment, **alone}, pass_fds=[its.fileno()], start_new_session=True)
    its.close()
    process.returncode = 0  # it is never waited for
    return mine


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork once for each request. Return in each program, with its request. The server itself never returns."""
    while True:
        content, streams, _, _ = socket.recv_fds(requests, 1 << 20, 16)
        if not content:
            os._exit(0)
        stdin_end, stdout_end = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            program = os.fork()
            if program == 0:
                while os.getppid() == parent:  # a program may ask for a signal when its parent ends
                    time.sleep(0.0005)
                os.close(stdin_end)
                os.close(stdout_end)
                requests.close()
                return {**json.loads(content), "streams": streams}
            os.write(stdout_end, str(program).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from now on the program is a child of the test
        os.close(stdout_end)
        requests.send(os.read(stdin_end, 100))
        for stream in (stdin_end, *streams):
            os.close(stream)


def _become(request: dict[str, Any]) -> None:
    """Set the program's session, folder, environment and streams."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    multiprocessing.util.spawnv_passfds = _fork_here
    signal.pthread_sigmask(signal.SIG_BLOCK, request.get("blocked", ()))
    apart = [fcntl.fcntl(stream, fcntl.F_DUPFD, 1000) for stream in request["streams"]]
    os.closerange(3, 1000)
    for target, source in zip((0, 1, 2, *request.get("files", ())), apart, strict=True):
        os.dup2(source, target)
        os.close(source)
    if "files" in request:
        sys.modules.pop(_PRELOAD, None)  # it imports for each server
    sys.stdin = open(0)  # noqa: SIM115 - as long as the program
    for target, name in enumerate(("stdout", "stderr"), 1):
        stream = open(target, "w", encoding="utf-8", buffering=1 if os.isatty(target) or target == 2 else -1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(arguments: list[str]) -> None:
    """Run the program as a new Python would."""
    setproctitle(" ".join([sys.executable, *arguments]))
    first, *others = arguments
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, "")
        exec(compile(others[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv = others
        sys.path.insert(0, "")
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Import the libraries, and serve the requests of a socket."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the first request may come from a thread that holds signals back
    for name in (*_IMPORTS, *filter(None, os.environ.get(MORE_IMPORTS, "").split(","))):
        importlib.import_module(name)
    setproctitle("tests.forked")  # it finds its place as long as the environment is the first one
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(request)
    os._exit(_status_of(lambda: _run(request["arguments"])))


def _status_of(program: Callable[[], None]) -> int:
    """Run a program to its end, and return its exit status. The interpreter's own end would report left-over objects."""
    status: object = 0
    try:
        program()
    except SystemExit as ended:
        status = ended.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing has it
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return status


if __name__ == "__main__":
    main()
