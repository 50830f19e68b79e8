"""Memory states of a rank while it trains: saved after steps that all ranks agree on, as often as their cost allows."""

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn import Module

from dlac_pipeline.checkpoint.engines import Engine, TrainerFiles
from dlac_pipeline.checkpoint.memory import states
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.stage.streamed_file import overwrite_state
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.ledger.typed_rows import repeatable
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.communicator import Communicator
from dlac_pipeline.train.open_attempt import OpenAttempt

MOST_OVERHEAD = 0.015
"""Share of the training time that memory states may take."""
_STATE_PER_WEIGHT = 4
"""Bytes of a state for each byte of its weights, before the first one has shown them."""
_COSTS = 3
"""Number of last costs whose median counts. After a single high one no state would be saved, and so none measured, for long."""
_SMOOTHING = 0.2
"""Share of the newest time in a mean."""


class MemorySaves:
    """The memory states of one rank. `begin` and `save` are collective."""

    def __init__(
        self, spec: JobSpec, attempt: OpenAttempt, communicator: Communicator, warn: Callable[[str], None]
    ) -> None:
        self._attempt = attempt
        self._communicator = communicator
        self._warn = warn
        self._run_folder = None if attempt.rehearses else states.memory_folder(spec)
        self._folder: Path | None = None
        """Folder of this attempt. None: no states are kept."""
        self._every = self._fixed = spec.checkpoint.memory_every_steps
        """Steps between two states. 0: not known yet. The first steps of the attempt show what a state costs."""
        self._number = 0
        self._saved_step = 0
        """Step of the last state."""
        self._failed = False
        self._costs: deque[float] = deque(maxlen=_COSTS)
        """Seconds that the last states took."""
        self._step_s = math.inf
        self._stepped_at: float | None = None
        self._due_at = 0.0

    def begin(self, engine: Engine) -> None:
        """Make the folder, if this node has room for the states of this engine. Earlier states were loaded. Collective."""
        if isinstance(engine, TrainerFiles):  # another program writes its files
            self._run_folder = None
        if self._run_folder is None:
            return
        point, problem = self._attempt.point, b""
        folder = states.attempt_folder(self._run_folder, point.attempt, point.nonce)
        if self._communicator.rank == 0:
            problem = self._make(folder, engine).encode()
        problem = self._communicator.tree.broadcast(problem)
        if not problem:
            self._folder = folder
        elif self._communicator.rank == 0:
            self._warn(f"{problem.decode()}; no memory states are kept, and a restart reads the last checkpoint")

    def step_done(self) -> None:
        """Note that a step is done, with the time since the one before or since a state was saved."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._step_s = _mean(self._step_s, now - self._stepped_at)
        self._stepped_at = self._due_at = now

    def pause(self) -> None:
        """Note that the time until the next step is not that of a step."""
        self._stepped_at = None

    def report(self, report: RankReport) -> RankReport:
        """Add what this rank has to say about states: that it cannot keep them, and rank 0 how often they are to be kept."""
        steps = 0
        if self._communicator.rank == 0 and not self._fixed and self._costs and math.isfinite(self._step_s):
            steps = math.ceil(statistics.median(self._costs) / (MOST_OVERHEAD * self._step_s))
        return replace(report, memory_steps=steps, memory_failed=self._failed)

    def on_sync(self, sync: StepSync) -> None:
        """Note a message that all ranks receive at this step. If one cannot keep states, none does."""
        self._every = sync.memory_steps or self._every
        if sync.memory_failed:
            self._folder = None

    def is_due(self, step: int) -> bool:
        """Return whether a state is to be saved after this step, equal on all ranks."""
        if self._folder is None:
            return False
        if self._fixed:
            return self._number == 0 or step % self._fixed == 0
        # The first state of a slot takes longer, because its memory is new. The next one shows the cost.
        return self._number <= states.SLOTS or 0 < self._every <= step - self._saved_step

    def save(self, engine: Engine, *, rows: int) -> None:
        """Save this rank's part of the state after the last step. All losses up to it are known."""
        assert self._folder is not None, "a state is due only with a folder"
        rank, slot = self._communicator.rank, states.slot_of(self._folder, self._number)
        files: list[tuple[str, int]] = []
        failure: Exception | None = None

        def write(path: Path, state: Any) -> None:
            files.append((str(path.relative_to(slot)), overwrite_state(state, path)))

        try:
            if self._number and rank == 0 and states.read_slot(states.slot_of(self._folder, self._number - 1)):
                states.forget_states(self._folder.parent, before=self._attempt.point.attempt)
            slot.mkdir(mode=0o700, exist_ok=True)
            states.seal_file(slot, rank).unlink(missing_ok=True)
        except OSError as err:
            failure = err
        try:  # collective, even if this rank cannot write
            engine.save(slot, write)
            save_rng(slot, rank, write)
            states.write_seal(slot, self._sealed(engine, files, rows))
        except (OSError, DlacError) as err:
            failure = failure or err
        if failure is None and self._number == 0:
            failure = self._lack_of_room(files)
        if failure is not None:
            self._give_up(slot, files, failure)
        self._number += 1
        self._saved_step = self._attempt.step
        self._stepped_at = time.monotonic()
        # the first state of a slot is written to new memory, which takes longer
        if self._number <= states.SLOTS + 1:
            self._costs.clear()
        self._costs.append(self._stepped_at - self._due_at)

    def end(self, *, committed: bool) -> None:
        """Remove the states at the end of the attempt, whose last checkpoint has everything. Called on one rank."""
        if self._run_folder is not None and committed:
            states.forget_states(self._run_folder, before=self._attempt.point.attempt + 1)

    def _make(self, folder: Path, engine: Engine) -> str:
        """Make the folder of this attempt's states, or return why none are kept. The states of old runs are removed."""
        try:
            states.make_folder(folder)
            states.forget_old_states(folder.parent)
            needed = states.SLOTS * _STATE_PER_WEIGHT * _bytes_of_weights(engine)
            if needed <= (room := states.room_for_states(folder)):
                return ""
            states.forget_states(folder.parent, before=self._attempt.point.attempt + 1)
        except Exception as err:  # the other ranks wait for an answer
            return f"expected to make {str(folder)!r} for states in memory, found {type(err).__name__}: {err}"
        return f"expected about {needed >> 20} MiB of free memory for two states in {str(folder)!r}, found {room >> 20} MiB"

    def _lack_of_room(self, files: list[tuple[str, int]]) -> OSError | None:
        """Return an error if the next state of all ranks of this size does not fit."""
        assert self._folder is not None, "a state was saved there"
        needed = sum(size for _, size in files) * self._communicator.world_size
        room = states.room_for_states(self._folder)
        return (
            None if needed <= room else OSError(f"{room >> 20} MiB of memory for another state of {needed >> 20} MiB")
        )

    def _give_up(self, slot: Path, files: list[tuple[str, int]], failure: Exception) -> None:
        """Free what this rank has written, and say so with the next message."""
        with suppress(OSError):
            states.seal_file(slot, self._communicator.rank).unlink(missing_ok=True)
            for name, _ in files:
                os.truncate(slot / name, 0)
        if not self._failed:
            self._warn(
                f"expected to keep states in {str(slot)!r}, found {failure}: a restart reads the last checkpoint"
            )
        self._failed = True

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
    """Return the bytes of a model's parameters, as a whole also where ranks share them out. A user's adapter may name none."""
    modules: Callable[[], Mapping[str, Any]] = getattr(engine, "modules", dict)
    parameters = (each for part in modules().values() if isinstance(part, Module) for each in part.parameters())
    # DeepSpeed leaves an empty tensor where it has partitioned one.
    return sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in parameters)


def _mean(before: float, newest: float) -> float:
    return newest if math.isinf(before) else (1 - _SMOOTHING) * before + _SMOOTHING * newest
