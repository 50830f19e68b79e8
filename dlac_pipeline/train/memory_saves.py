"""Memory states of a rank while it trains: saved after steps that all ranks agree on, as often as their cost allows."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.nn import Module

from dlac_pipeline.checkpoint.engines import Engine, TrainerFiles
from dlac_pipeline.checkpoint.memory import states
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.stage.streamed_file import overwrite_state
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.ledger.typed_rows import repeatable
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.communicator import Communicator
from dlac_pipeline.train.open_attempt import OpenAttempt

MOST_OVERHEAD = 0.015
"""Share of the training time that memory states may take."""
_COPIES = 2
_STATE_PER_WEIGHT = 4
"""Bytes of a state for each byte of its weights: an optimizer has up to two or three numbers for each."""


class MemorySaves:
    """The memory states of one rank. `save` is collective."""

    def __init__(
        self, spec: JobSpec, attempt: OpenAttempt, communicator: Communicator, warn: Callable[[str], None]
    ) -> None:
        self._attempt = attempt
        self._communicator = communicator
        self._warn = warn
        self._run_folder = None if attempt.rehearses else states.memory_folder(spec)
        self._folder: Path | None = None
        self._fixed = spec.checkpoint.memory_every_steps
        self._every = self._fixed
        """Steps between two states. 0: not known yet. The first step of the attempt shows what a state costs."""
        self._number = 0
        self._cost_s = 0.0
        self._step_s = math.inf
        self._stepped_at: float | None = None

    def begin(self, engine: Engine) -> None:
        """Make the folder, if this node has room for the states of this engine. Collective."""
        if isinstance(engine, TrainerFiles):  # another program writes its files
            self._run_folder = None
        problem = b""
        if self._run_folder is not None and self._communicator.rank == 0:
            problem = self._problem(self._run_folder, engine).encode()
        if self._run_folder is None or (problem := self._communicator.tree.broadcast(problem)):
            self._run_folder = None
            if problem and self._communicator.rank == 0:
                self._warn(f"{problem.decode()}; no memory states are kept, and a restart reads the last checkpoint")
            return
        self._folder = self._run_folder / self._attempt.point.nonce

    def step_done(self) -> None:
        """Note that a step is done, with the time since the one before or since a state was saved."""
        now = time.monotonic()
        if self._stepped_at is not None:
            taken_s = now - self._stepped_at
            self._step_s = taken_s if math.isinf(self._step_s) else 0.8 * self._step_s + 0.2 * taken_s
        self._stepped_at = now

    def wanted_steps(self) -> int:
        """Rank 0's wish for the steps between two states. 0: it does not know."""
        if self._fixed or not self._cost_s or math.isinf(self._step_s):
            return 0
        return math.ceil(self._cost_s / (MOST_OVERHEAD * self._step_s))

    def agreed(self, steps: int) -> None:
        """Note rank 0's wish, at the same step on all ranks."""
        self._every = steps or self._every

    def is_due(self, step: int) -> bool:
        """Return whether a state is to be saved after this step, equal on all ranks."""
        if self._folder is None:
            return False
        return self._number == 0 or (self._every > 0 and step % self._every == 0)

    def save(self, engine: Engine, *, rows: int) -> None:
        """Save this rank's part of the state after the last step. All losses up to it are known."""
        assert self._folder is not None, "a state is due only with a folder"
        began, rank = time.monotonic(), self._communicator.rank
        slot = states.slot_of(self._folder, self._number)
        if self._number == 1 and rank == 0:  # all ranks have sealed the first state of this attempt
            assert self._run_folder is not None, "a folder is below it"
            states.forget_states(self._run_folder, but=self._folder.name)
        files: list[tuple[str, int]] = []
        failure: Exception | None = None

        def write(path: Path, state: Any) -> None:
            files.append((str(path.relative_to(slot)), overwrite_state(state, path)))

        try:
            slot.mkdir(mode=0o700, exist_ok=True)
            states.seal_file(slot, rank).unlink(missing_ok=True)
        except OSError as err:
            failure = err
        try:  # collective, even if this rank cannot write
            engine.save(slot, write)
            save_rng(slot, rank, write)
        except (OSError, DlacError) as err:
            failure = failure or err
        if failure is None:
            with suppress(OSError):
                states.write_seal(slot, self._sealed(engine, files, rows))
        elif self._number < _COPIES:
            self._warn(
                f"expected to keep a state in {str(slot)!r}, found {failure}: a restart reads the last checkpoint"
            )
        self._number += 1
        self._stepped_at = time.monotonic()
        self._cost_s = max(1e-6, self._stepped_at - began) if self._number < _COPIES + 1 else self._cost_of(began)

    def end(self) -> None:
        """Remove the states at the end of the run, whose last checkpoint has everything. Called on one rank."""
        if self._run_folder is not None:
            states.forget_states(self._run_folder)

    def _cost_of(self, began: float) -> float:
        return 0.8 * self._cost_s + 0.2 * (time.monotonic() - began)

    def _problem(self, folder: Path, engine: Engine) -> str:
        """Make the folder of this attempt's states, or return why none are kept. The folders of old runs are removed."""
        needed = _COPIES * _STATE_PER_WEIGHT * _bytes_of_weights(engine)
        try:
            states.make_attempt_folder(folder, self._attempt.point.nonce)
            states.forget_old_states(folder)
            room = states.room_for_states(folder)
        except OSError as err:
            return f"expected to make {str(folder)!r} for states in memory, found {err}"
        if needed > room:
            return f"expected about {needed >> 20} MiB of free memory for two states in {str(folder)!r}, found {room >> 20} MiB"
        return ""

    def _sealed(self, engine: Engine, files: list[tuple[str, int]], rows: int) -> states.RankState:
        attempt, rank = self._attempt, self._communicator.rank
        tracker, point = attempt.tracker, attempt.point
        trained = [*attempt.manager.in_progress(), tracker]
        cursors = tracker.cursors
        return states.RankState(
            attempt=point.attempt,
            nonce=point.nonce,
            head=attempt.manager.head,
            step=tracker.step,
            rank=rank,
            world_size=self._communicator.world_size,
            engine=engine.name,
            leg=point.leg,
            groups=list(tracker.groups),
            cursors=[] if cursors is None else cursors.tolist(),
            trained=list(_trained(trained)),
            rows=rows,
            files=files,
        )


def _trained(trackers: list[ReaderStateTracker]) -> Iterator[states.Trained]:
    for tracker in trackers:
        yield states.Trained(
            since=tracker.committed_step,
            losses=list(tracker.losses),
            skipped=list(tracker.skipped),
            advances=repeatable(tracker.advances()),
        )


def _bytes_of_weights(engine: Engine) -> int:
    modules = [part for part in engine.modules().values() if isinstance(part, Module)]
    return sum(each.numel() * each.element_size() for module in modules for each in module.parameters())
