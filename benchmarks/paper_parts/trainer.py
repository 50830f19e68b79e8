"""A process that trains: `python -m benchmarks.paper_parts.trainer`. It reads the file name of a training per line.

Each launch of a training is a process of its own, which is forked from this one, and which kills itself with SIGKILL in the step
of its fault. The next one resumes from the last checkpoint. One process reads the shares of all ranks and trains on the whole
global batch, so that the sum of gradients does not depend on the number of ranks. It answers with a line of JSON per training.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.paper_parts.model import loss_of, new_model, validation_loss
from dlac_pipeline.extensions.loader_check.protocol import Job, Loader

_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One training: its loader, its rows, and the steps in which it is killed."""

    loader: str
    """Module of benchmarks.peer_loaders, or "training_run" for DLAC as a whole."""
    keeps_state: bool
    """False: the loader begins its pass again after each fault."""
    job: Job
    """Of one of the ranks. Rank and number of ranks are set here."""
    folder: str
    seed: int
    steps: int
    save_every: int
    evaluate_every: int
    faults: tuple[int, ...]
    """Steps in which it is killed, before the optimizer's step, in order."""
    worlds: tuple[int, ...]
    """Number of ranks of each launch."""

    @property
    def log(self) -> Path:
        """One line of JSON per trained step, in the order of training."""
        return Path(self.folder) / "steps.jsonl"

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Training:
        """Read it from a file."""
        raw = json.loads(path.read_text())
        lists = {name: tuple(raw[name]) for name in ("faults", "worlds")}
        return cls(**{**raw, **lists, "job": Job(**raw["job"])})


class Global(NamedTuple):
    """The batch of one step, of all ranks."""

    pass_number: int
    tokens: torch.Tensor
    ids: list[int]


def main() -> None:
    """Train what is named on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library is no answer
    _import_all()
    for line in sys.stdin:
        training = Training.read(Path(line.strip()))
        begun = time.monotonic()
        failed = ""
        module = _module_of(training.loader)
        for launch in range(len(training.worlds)):
            failed = _launch(training, launch, module)
            if failed:
                break
        print(json.dumps({"failed": failed, "seconds": time.monotonic() - begun}), file=answers)


def _import_all() -> None:
    """Train a step, so that PyTorch has imported what it imports at first use. A launch would take 2 s longer."""
    model, optimizer = new_model(0)
    loss_of(model, torch.zeros((1, 2), dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _module_of(loader: str) -> Any:
    """Import what a launch needs here, so that no launch imports it again."""
    name = "benchmarks.paper_parts.whole" if loader == "training_run" else f"benchmarks.peer_loaders.{loader}"
    return importlib.import_module(name)


def _launch(training: Training, launch: int, module: Any) -> str:
    """Fork one launch and wait for its end. Return what went wrong, or an empty text."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            errors = os.open(Path(training.folder) / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            signal.alarm(int(_LIMIT_S))
            train = module.train if training.loader == "training_run" else _train
            train(training, launch, *(() if training.loader == "training_run" else (module,)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    expected = -signal.SIGKILL if launch < len(training.faults) else 0
    if code == expected:
        return ""
    lines = [line for line in (Path(training.folder) / "errors").read_text().splitlines() if line.strip()]
    return f"launch {launch} ended with {code}: {lines[-1] if lines else 'no message'}"


def _train(training: Training, launch: int, module: Any) -> None:
    model, optimizer = new_model(training.seed)
    file = Path(training.folder) / "checkpoint.pt"
    saved: dict[str, Any] = torch.load(file, weights_only=False) if file.exists() else {}
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    world = training.worlds[launch]
    states = saved.get("states", [])
    loaders = [_open(training, module, rank, world, states) for rank in range(world)]
    step = saved.get("step", 0)
    validation = torch.from_numpy(np.load(Path(training.folder).parent / "validation.npy")).long()
    with training.log.open("a") as log:
        for batch in _batches(training, loaders, saved.get("pass", 0)):
            step += 1
            optimizer.zero_grad()
            loss = loss_of(model, batch.tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            if step in training.faults[launch : launch + 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            entry = {"step": step, "pass": batch.pass_number, "loss": loss.item(), "ids": batch.ids}
            if step % training.evaluate_every == 0 or step == training.steps:
                entry["validation"] = validation_loss(model, validation)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            if step % training.save_every == 0:
                _save(file, {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "pass": batch.pass_number,
                    "states": [loader.state() for loader in loaders] if training.keeps_state else [],
                })  # fmt: skip
            if step == training.steps:
                break
    for loader in loaders:
        loader.close()


def _open(training: Training, module: Any, rank: int, world: int, states: list[bytes]) -> Loader:
    """Open a rank's loader. With another number of ranks, rank r gets the state of rank r mod the number before."""
    own = (states[0] if module.SHARED_STATE else states[rank % len(states)]) if states else None
    loader: Loader = module.open_loader(replace(training.job, rank=rank, world_size=world), own)
    return loader


def _batches(training: Training, loaders: list[Loader], from_pass: int) -> Iterator[Global]:
    """Yield global batches without end. A pass ends for all ranks as soon as one of them has no batch, and another begins."""
    for pass_number in itertools.count(from_pass):
        found = False
        parts = [loader.batches(pass_number) for loader in loaders]
        while len(shares := [share for part in parts for share in itertools.islice(part, 1)]) == len(parts):
            found = True
            ids = [int(row) for loader, share in zip(loaders, shares, strict=True) for row in loader.ids(share)]
            tokens = torch.cat([torch.as_tensor(np.asarray(share["tokens"])).long() for share in shares])
            yield Global(pass_number, tokens, ids)
        if not found and pass_number > from_pass:  # a state may be that of the end of a pass
            raise RuntimeError(f"expected batches in pass {pass_number}, found none")


def _save(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    torch.save(content, partial)
    partial.rename(file)


if __name__ == "__main__":
    main()
