"""Imports of multiprocessing's fork server, once per supervisor, so that ranks start without importing.

The fork server imports this module, and this module the rest. See docs/design/0011-nodes.md.
"""

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

from setproctitle import setproctitle

from dlac_pipeline.lakehouse.masking import mask_secrets

PRELOAD_VARIABLE = "DLAC_PRELOAD"
"""Set for the fork server alone: `title`, `log`, `problem` (two files), `folder` of the script, `modules` of the job spec."""
_ALWAYS = (
    "torch._dynamo",  # each optimizer imports it, which takes a second
    "dlac_pipeline.train.training_run",
)
_FORKABLE_THREADS = re.compile("jemalloc_bg_thd|cuda[0-9a-f]{11}")
"""Threads of Arrow's allocator, which a forked process begins again, and of NVML, which it is assumed not to need. The threads
of CUDA's driver have such names too: `_has_opened_accelerator` finds those."""
_CUDA_NOT_INITIALIZED = 3
"""Answer of CUDA's driver to each question before it is initialized."""
_PR_SET_PDEATHSIG = 1


def preload(wanted: dict[str, str | list[str]]) -> None:
    """Import the modules that ranks need. The process ends, with its reason in a file, if it must not be forked then."""
    setproctitle(str(wanted["title"]))
    with open(str(wanted["log"]), "ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    end_with_parent(signal.SIGKILL)  # an import may hang; afterwards the server ends with its last client
    problem = Path(str(wanted["problem"]))
    for name in _ALWAYS:
        _import(name, problem, advice="")
    sys.path.insert(0, str(wanted["folder"]))
    for name in wanted["modules"]:
        _import(name, problem, advice="take it off launch.preload, or ")
    gc.collect()
    gc.freeze()  # shared memory stays shared
    end_with_parent(0)


def _import(name: str, problem: Path, *, advice: str) -> None:
    try:
        importlib.import_module(name)
        if _has_opened_accelerator():
            raise RuntimeError("it opened the accelerator, which does not survive a fork")
        threads = _threads()
        if threads:
            raise RuntimeError(f"it began the threads {threads}, which do not survive a fork")
    except (Exception, SystemExit) as err:
        found = mask_secrets(f"{type(err).__name__}: {err}")
        problem.write_text(
            f'expected to import {name!r} before ranks are forked, found {found}; {advice}set launch.start = "spawn"'
        )
        os._exit(1)


def _has_opened_accelerator() -> bool:
    """Return whether PyTorch or a library has opened the accelerator. `torch.accelerator.is_available` would open it."""
    torch = sys.modules["torch"]
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if getattr(module, "is_initialized", bool)():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALIZED)


def _threads() -> list[str]:
    """Return the names of threads that a forked process would miss."""
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended since
            name = (task / "comm").read_text().strip()
            if int(task.name) != os.getpid() and not _FORKABLE_THREADS.fullmatch(name):
                found.append(name)
    return found


def end_with_parent(number: int) -> None:
    """Ask the kernel to send this signal when the thread that started this process ends. 0: none any more. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


if PRELOAD_VARIABLE in os.environ:
    preload(json.loads(os.environ.pop(PRELOAD_VARIABLE)))
