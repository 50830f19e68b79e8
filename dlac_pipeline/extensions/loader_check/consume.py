"""The training loop: drives one loader by a job, logs each batch, saves states, and returns its measurements."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dlac_pipeline.extensions.loader_check.protocol import Job, Loader
from dlac_pipeline.extensions.loader_check.row_log import Ids, Record, record_bytes

_METHODS = ("batches", "ids", "state", "close")
_MOST = 4
"""A loader that yields so many times the rows of all passes is taken for one that never ends."""


class Misuse(Exception):
    """The loader breaks its protocol."""


def consume(module: ModuleType, job: Job) -> dict[str, Any]:
    """Run the loop to its end, its stop or its death, and return times (s), bytes of state and rows (or tokens).

    Raises `Misuse` if the loader breaks its protocol.
    """
    begun = time.perf_counter()
    place = _Place.read(Path(job.load)) if job.load else _Place(0, 0, None)
    loader: Loader = module.open_loader(job, place.state)
    _check_methods(module, loader)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step, seen, first = place.step, 0, 0.0
    for pass_number in range(place.pass_number, job.passes):
        for batch in loader.batches(pass_number):
            ids = _ids_of(loader, batch)
            step += 1
            os.write(log, record_bytes(Record(pass_number, step, ids)))
            if first:
                seen += len(ids)
            first = first or time.perf_counter()
            if step in job.save_at:
                _Place(pass_number, step, _state_of(loader)).write(Path(job.save), step)
            if step == job.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == job.stop_at:
                break
            if step > _MOST * job.passes * (job.rows // job.rank_batch + 1):
                raise _misuse(loader.batches, f"end after {job.rows:,} rows a pass", f"no end after {step:,} batches")
        if job.stop_after_pass:
            _Place(pass_number + 1, step, _state_of(loader)).write(Path(job.save), step)
            break
        if job.stop_at and step == job.stop_at:  # a rank may have no batch of a pass
            break
    if step < (due := max([*job.save_at, job.die_at])):
        raise _misuse(loader.batches, f"yield {due} batches of {job.rank_batch} rows to this rank", f"only {step}")
    measured = _measurements(begun, first, seen, step)
    loader.close()
    return measured


def _check_methods(module: ModuleType, loader: object) -> None:
    missing = [name for name in _METHODS if not callable(getattr(loader, name, None))]
    if missing:
        expected = f"return a loader with the methods {', '.join(_METHODS)}"
        raise _misuse(module.open_loader, expected, f"{type(loader).__name__!r} without {', '.join(missing)}")


def _ids_of(loader: Loader, batch: Any) -> Ids:
    ids = np.asarray(loader.ids(batch))
    if ids.size and ids.dtype.kind not in "iu":
        raise _misuse(
            loader.ids, "return the row_id of each row of the batch, as integers", f"values of type {ids.dtype}"
        )
    return ids.reshape(-1).astype(np.int64)


def _state_of(loader: Loader) -> bytes:
    state: object = loader.state()
    if isinstance(state, bytes):
        return state
    found = f"{type(state).__name__}: pack it with pickle.dumps(...), or json.dumps(...).encode()"
    raise _misuse(loader.state, "return bytes", found)


def _misuse(function: Callable[..., Any], expected: str, found: str) -> Misuse:
    """Return the error for a function of the loader, with its line."""
    code = getattr(function, "__code__", None)
    place = "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: "
    return Misuse(f"{place}expected {function.__name__}() to {expected}, found {found}")


def _measurements(begun: float, first: float, seen: int, step: int) -> dict[str, Any]:
    now = time.perf_counter()
    return {"first_batch_s": first - begun, "seen": seen, "seconds": now - first if first else 0.0, "steps": step}


class _Place:
    """The position of a training loop, which a checkpoint holds next to the loader's state."""

    def __init__(self, pass_number: int, step: int, state: bytes | None) -> None:
        self.pass_number, self.step, self.state = pass_number, step, state

    def write(self, path: Path, step: int) -> None:
        assert self.state is not None
        for target in (path, path.with_name(f"{path.name}.step{step}")):  # the last state, and that of this step
            partial = target.with_name(target.name + ".partial")
            head = json.dumps({"pass": self.pass_number, "step": self.step}).encode() + b"\n"
            partial.write_bytes(head + self.state)
            partial.rename(target)

    @classmethod
    def read(cls, path: Path) -> "_Place":
        head, _, state = path.read_bytes().partition(b"\n")
        place = json.loads(head)
        return cls(place["pass"], place["step"], state)
