"""The training loop: drives one loader by a job, logs each batch, saves states, and returns its measurements."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.peer_loaders.protocol import Job, Loader, Record, record_bytes


def consume(module: ModuleType, job: Job) -> dict[str, Any]:
    """Run the loop to its end, its stop or its death, and return times (s), bytes of state and rows (or tokens)."""
    begun = time.perf_counter()
    place = _Place.read(Path(job.load)) if job.load else _Place(0, 0, None)
    loader: Loader = module.open_loader(job, place.state)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step, seen, first = place.step, 0, 0.0
    for pass_number in range(place.pass_number, job.passes):
        for batch in loader.batches(pass_number):
            ids = loader.ids(batch)
            step += 1
            os.write(log, record_bytes(Record(pass_number, step, ids)))
            if first:
                seen += len(ids)
            first = first or time.perf_counter()
            if step in job.save_at:
                _Place(pass_number, step, loader.state()).write(Path(job.save), step)
            if step == job.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == job.stop_at:
                break
        if step == job.stop_at:
            break
    measured = _measurements(begun, first, seen, step)
    loader.close()
    return measured


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
    def read(cls, path: Path) -> _Place:
        head, _, state = path.read_bytes().partition(b"\n")
        place = json.loads(head)
        return cls(place["pass"], place["step"], state)
