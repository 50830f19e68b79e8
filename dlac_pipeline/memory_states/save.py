"""Memory states of a rank while it trains: saved after steps that all ranks agree on, at the interval of least cost."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

from torch.nn import Module

from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.checkpoint.manager import CheckpointManager
from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct, Writer, in_thread
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE
from dlac_pipeline.lakehouse.errors import DlacError, StateChanged
from dlac_pipeline.lakehouse.ledger.typed_rows import repeatable
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.last_step import LastStep, last_step_of
from dlac_pipeline.memory_states.memory_file import MemoryFile, is_tmpfs
from dlac_pipeline.memory_states.pace import Pace
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker

_log = logging.getLogger(__name__)
_STATE_PER_WEIGHT = 4
"""Bytes of a state for each byte of the weights that are trained, before the first one has shown them. Frozen ones have 1."""
_NOT_WANTED = "-"
"""No states are kept, and no warning says so."""
_MORE_ROOM = 'start the container with a larger --shm-size, free memory of the node, or set checkpoint.memory = ""'
"""Advice to a user if memory is too small."""
_FIRST = states.SLOTS + 2
"""States that are saved before their cost sets the pace. The first one of a slot takes longer, because its memory is new."""
_LEAST_BESIDE_BYTES = 4 << 20
"""A smaller part of a state is copied at once, which takes about a millisecond."""
_LOOK_S = 0.002
"""Seconds between two looks for the end of a copy."""


class MemorySaves:
    """The memory states of one rank. `begin` and `save` are collective."""

    def __init__(
        self,
        spec: JobSpec,
        point: ResumePoint,
        communicator: Communicator,
        tracker: ReaderStateTracker,
        manager: CheckpointManager,
        warn: Callable[[str], None],
    ) -> None:
        self._point = point
        self._communicator = communicator
        self._tracker = tracker
        self._manager = manager
        self._warn = warn
        can_keep = not point.rehearses_until and (LAUNCH_VARIABLE in os.environ or communicator.is_on_one_node)
        self._is_wanted = can_keep and bool(spec.checkpoint.memory)
        run_folder = states.memory_folder(spec) if can_keep else None
        self._own = None if run_folder is None else states.attempt_folder(run_folder, point.attempt, point.nonce)
        """Folder of this attempt, or None if this node keeps no states."""
        self._folder: Path | None = None
        """Folder of this attempt while states are kept."""
        self._every = self._fixed = spec.checkpoint.memory_every_steps
        """Steps between two states. 0: not known yet. The first steps of the attempt show the cost of a state."""
        self._number = 0
        self._saved_step = 0
        """Step of the last state."""
        self._copied = False
        """True if all ranks know that this state is whole, also at the buddies of all nodes."""
        self._is_outdated = False
        """True if a checkpoint was taken since the last state, which does not continue it."""
        self._has_buddy = not communicator.is_on_one_node
        self._waits = spec.checkpoint.memory_waits
        self._waited_for = 0
        """Step of the last state whose copy was waited for. No copy is waited for twice."""
        self._longest_wait_s = spec.launch.hang_timeout_s / 2
        """A rank that waits for a copy shows no progress. The supervisor ends the wait before, if no copy succeeds."""
        self._failed = False
        self._files: dict[Path, MemoryFile] = {}
        """The files that this rank has written."""
        self._memory = CopyMemory()
        self._part_bytes = 0
        self._copying: Future[float] | None = None
        """The seconds to come that the last state takes, while it is copied beside training."""
        self._is_left_out = False
        self._maps = run_folder is not None and is_tmpfs(run_folder)
        self._pace = Pace(spec.checkpoint, point)
        self._last: LastStep | None = None
        self._is_held = not self._has_buddy
        """False: no failure keeps the last step."""

    def begin(self, engine: Engine, loaded: states.MemoryState | None) -> None:
        """Make the folder on each node, if all have room for states of this engine beside the `loaded` one. Collective."""
        self._free_fetched()
        if engine.writes_itself or not self._is_wanted:
            self._own, problem = None, _NOT_WANTED
        elif self._own is None:
            found = f"expected a folder of shared memory on {gethostname()} as on other nodes, found none"
            problem = found if self._has_buddy else _NOT_WANTED
        else:
            problem = self._make(self._own, engine, loaded) if self._communicator.is_first_of_node else ""
        tree = self._communicator.tree
        agreed = f"{self._fixed} {self._waits:d} {tree.lowest(problem.encode()).decode()}"  # nodes may have different settings
        fixed, waits, problem = tree.broadcast(agreed.encode()).decode().split(" ", 2)
        self._every, self._fixed, self._waits = int(fixed), int(fixed), waits == "1"
        if not problem:
            self._folder = self._own
            return
        if self._communicator.rank == 0 and problem != _NOT_WANTED:
            self._warn(f"{problem}; no memory states are kept, and a restart reads the last checkpoint")
        self._forget()

    def step_done(self) -> None:
        """Note that a step is done."""
        if self._last is not None:
            self._last.forget()
        self._pace.step_done(self._finish_copy())

    def return_to_script(self) -> None:
        """Note that the script works on after its step, until the state is saved."""
        self._pace.return_to_script()

    def pause(self) -> None:
        """Note that a checkpoint was taken. The next state comes earlier."""
        self._pace.pause()
        self._is_outdated = True

    def wait_for_copy(self, is_asked: Callable[[], bool]) -> None:
        """Wait until this node's part of the last state is copied, if another one is due now and `memory_waits` is set.

        The wait also ends if this rank cannot keep states, or `is_asked` to stop.
        """
        if not (self._waits and self._number and self.is_due(self._tracker.step)):
            return
        until = time.monotonic() + (self._longest_wait_s if self._saved_step != self._waited_for else 0.0)
        while not (self._is_copied() or self._failed or is_asked()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self._waited_for = self._saved_step
        self._pace.waited()

    def report(self, report: RankReport) -> RankReport:
        """Add this rank's facts about states: that it cannot keep them, and from rank 0 how often they must be kept."""
        steps = self._pace.steps if self._communicator.rank == 0 and not self._fixed else 0
        return replace(report, memory_steps=steps, memory_failed=self._failed, memory_copied=self._is_copied())

    def on_sync(self, sync: StepSync) -> None:
        """Note a message that all ranks receive at this step. If one cannot keep states, none does."""
        self._every, self._copied = sync.memory_steps or self._every, sync.memory_copied
        if sync.memory_failed and self._folder is not None:
            if self._communicator.rank == 0 and not self._failed:
                self._warn(
                    "a rank could not keep a state in memory, for the reason in its log: a restart reads the last checkpoint"
                )
            if self._communicator.is_first_of_node:
                states.remove(self._folder)
            self._free_files(self._folder)
            self._folder = None

    def is_due(self, step: int) -> bool:
        """Return whether a state is to be saved after this step, equal on all ranks."""
        if self._folder is None:
            return False
        if self._fixed:
            return self._number == 0 or step % self._fixed == 0
        if self._has_buddy and 0 < self._number < _FIRST and not self._copied:
            return False  # to ask in each step until the copy is done would cost more than a late state
        passed, every = step - self._saved_step, self._every
        if self._is_outdated:  # a restart would read the checkpoint
            every = (every + 1) // 2
        is_time = 0 < every <= passed and (self._copied or passed % every == 0 or not self._has_buddy)
        return self._number < _FIRST or is_time

    def save(self, engine: Engine, *, rows: int) -> None:
        """Save this rank's part of the state after the last step, if the one before is copied. All losses up to it are known.

        Weights and moments are copied beside training, until the optimizer's next step.
        """
        assert self._folder is not None, "a state is due only with a folder"
        self._finish_copy()
        if self._number and not self._copied:
            if self._has_buddy or self._saved_step == self._tracker.step:  # the slot may have the only whole state
                return
            self._number -= 1  # a rank has left the last state out, and its slot is written again
        worked_s = self._pace.saving()
        slot = states.slot_of(self._folder, self._number)
        failure: OSError | None = None
        self._is_left_out = False
        try:
            if self._number and self._communicator.is_first_of_node:
                self._make_room(self._folder)
            slot.mkdir(mode=0o700, exist_ok=True)
            states.remove_seal(slot, self._communicator.rank)
        except OSError as err:
            failure = err
        try:  # collective, even if this rank cannot write
            self._write(slot, engine, self._sealed(engine, rows), failure)
        except (OSError, DlacError) as err:
            self._give_up(slot, failure or err)
        self._number, self._saved_step, self._copied = self._number + 1, self._tracker.step, False
        self._is_outdated = False
        self._pace.saved(worked_s, is_typical=self._number > states.SLOTS + 1)

    def hold(self, engine: Engine, losses: Sequence[float | None] | None, *, rows: int) -> None:
        """Hold the last step, whose state is not whole yet, with `losses` that no message has brought yet."""
        if self._folder is None or not self._is_held:
            return
        try:
            if self._last is None:
                self._last = last_step_of(self._folder, engine, self._manager.gate, self._overwrite)
                self._is_held = self._last is not None
            if self._last is not None:
                self._last.hold(lambda: self._sealed(engine, rows), losses, step_s=self._pace.step_s)
        except Exception as err:  # whatever a part of the script's state does
            if self._last is not None:
                self._last.drop()
            self._last, self._is_held = None, False
            found = f"found {type(err).__name__}: {err}; a failure repeats the steps since the last state in memory"
            self._report_problem(f"expected to hold the last step in memory, {found}")

    def keep_last(self) -> None:
        """Save the state after the last finished step, before this rank ends because of a failure. A problem is logged."""
        if self._folder is None or self._last is None or not self._number:
            return
        try:
            self._finish_copy()
            slot = states.slot_of(self._folder, self._number - 1)
            last = states.read_slot(slot)
            if last is not None:
                self._make_room(self._folder)
                slot = states.slot_of(self._folder, self._number)
            self._last.keep(slot, after=0 if last is None else last.first.step)
        except Exception:
            _log.exception("expected to keep the state after the last step: a restart reads an earlier one")

    def _overwrite(self, path: Path, state: Any) -> int:
        if path not in self._files:
            self._files[path] = MemoryFile(path, is_mapped=self._maps)
        return self._files[path].overwrite(state)

    def _write(self, slot: Path, engine: Engine, sealed: states.RankState, failure: OSError | None) -> None:
        """Write this rank's part and seal it, perhaps beside training. A rank with a failure raises it, and writes nothing."""
        began, stable = time.monotonic(), self._stable()

        def overwrite(state: Any, path: Path) -> None:
            read = writer.watch.compare if isinstance(writer, Copies) else None
            sealed.files.append((str(path.relative_to(slot)), self._files[path].overwrite(state, read)))

        def write(path: Path, state: Any) -> None:
            nonlocal failure
            try:
                if failure is None:
                    if path not in self._files:
                        self._files[path] = MemoryFile(path, is_mapped=self._maps)
                    writer.write(path, state)
            except (OSError, RuntimeError, MemoryError) as err:  # PyTorch may raise these for page-locked memory
                failure = err if isinstance(err, OSError) else OSError(f"{type(err).__name__}: {err}")

        def complete() -> float:
            try:
                writer.finish()
                states.write_seal(slot, sealed)
            finally:
                writer.close()
            return time.monotonic() - began

        writer: Writer = Copies(self._memory, overwrite, stable=stable, streams=True) if stable else Direct(overwrite)
        engine.save(slot, write)
        save_rng(slot, sealed.rank, write)
        if failure is not None:
            raise failure
        writer.handed_over()
        if isinstance(writer, Direct):
            complete()
            self._part_bytes = sum(size for _, size in sealed.files)
        else:
            self._copying = in_thread(complete, "memory state")
            self._manager.gate.hold(writer.wait)

    def _stable(self) -> Mapping[Any, str]:
        """Return the storages to copy beside training: most of a large state, because copies of the rest take memory."""
        if 0 < self._part_bytes < _LEAST_BESIDE_BYTES:
            return {}
        stable = self._manager.gate.stable()
        return stable if 2 * sum(size for _, size in stable) > self._part_bytes else {}

    def _finish_copy(self) -> float:
        """Wait until the last state is sealed, or is known to be left out. Return the seconds of its copy beside training."""
        if self._copying is None:
            return 0.0
        copied, self._copying = self._copying, None
        try:
            return copied.result()
        except Exception as err:
            # with a buddy no message says that a state is left out, and not late
            if isinstance(err, StateChanged) and not self._has_buddy:
                self._is_left_out = True
                self._report_problem(f"{err}; the state of step {self._saved_step} in memory is left out")
            elif self._folder is not None:
                self._give_up(states.slot_of(self._folder, self._number - 1), err)
            return 0.0

    def end(self, *, committed: bool) -> None:
        """Remove the states at the end of the attempt, if its last checkpoint has everything."""
        if self._own is not None and committed:
            self._free_files(self._own)
            self._forget()

    def _forget(self) -> None:
        """Remove all states of the run on this node."""
        if self._own is not None and self._communicator.is_first_of_node:
            states.forget_states(self._own.parent, before=self._point.attempt + 1)

    def close(self) -> None:
        """Close the files. The states stay, for the next attempt. A failure is logged, because the rank has more to close."""
        try:
            self._finish_copy()
            while self._files:
                self._files.popitem()[1].close()
        except Exception:
            _log.exception("expected to close the files of states in memory")

    def _free_files(self, folder: Path) -> None:
        """Free the memory of this rank's files in a folder."""
        self._finish_copy()
        for path in [path for path in self._files if path.is_relative_to(folder)]:
            self._files.pop(path).free()

    def _free_fetched(self) -> None:
        """Remove fetched parts of the state that the attempt resumed from, once all ranks have loaded it. Collective."""
        tree = self._communicator.tree
        if isinstance(self._point, FromMemory) and self._has_buddy:
            tree.broadcast(tree.lowest(b""))
            if self._communicator.is_first_of_node and self._own is not None:
                states.remove(states.fetched_folder(self._own, self._communicator.first_rank_here))

    def _make(self, folder: Path, engine: Engine, loaded: states.MemoryState | None) -> str:
        """Make the folder of this attempt's states, or return why none are kept. Old states are removed.

        The state that was loaded stays until a new state is whole. All earlier ones are removed.
        """
        try:
            states.make_folder(folder)
            states.forget_old_states(folder.parent)
            earlier = states.forget_other_slots(folder.parent, loaded, before=self._point.attempt)
            state = self._state_here(engine)
            needed = max(state, states.SLOTS * state - earlier)
            if needed <= (room := states.room_for_states(folder)):
                return ""
        except Exception as err:  # the other ranks wait for an answer
            found = f"found {type(err).__name__}: {err}; or name another folder in checkpoint.memory"
            return f"expected to make {str(folder)!r} for states in memory, {found}"
        return (
            f"expected about {needed >> 20} MiB of free memory for states in {str(folder)!r} on {gethostname()}, found "
            f"{room >> 20} MiB: {_MORE_ROOM}"
        )

    def _make_room(self, folder: Path) -> None:
        """Remove earlier attempts' states beside a whole one. Raise `OSError` if a second one as large is not likely to fit."""
        states.forget_states(folder.parent, before=self._point.attempt)
        if self._number > 1:
            return
        first, second = (states.bytes_in(states.slot_of(folder, number)) for number in range(states.SLOTS))
        needed, room = first - second, states.room_for_states(folder)
        if needed > room:
            raise OSError(f"{room >> 20} MiB of memory for another state of {first >> 20} MiB")

    def _give_up(self, slot: Path, failure: Exception) -> None:
        """Free the states that this rank has written, and report it with the next message."""
        with suppress(OSError):
            states.remove_seal(slot, self._communicator.rank)
        self._free_files(slot)
        with suppress(OSError):  # no rank waits for a copy then. The mark needs some of the freed memory
            states.mark_copied(slot.parent, self._communicator.first_rank_here, states.ALWAYS)
        if not self._failed:
            remedy = f"{_MORE_ROOM}; " if isinstance(failure, OSError) else ""
            problem = f"expected to keep states in {str(slot)!r}, found {failure}: {remedy}a restart reads the last checkpoint"
            self._report_problem(problem)
        self._failed = True

    def _report_problem(self, problem: str) -> None:
        """Warn. Rank 0 publishes that a rank has one."""
        (self._warn if self._communicator.rank == 0 else _log.warning)(problem)

    def _is_copied(self) -> bool:
        """Return whether this rank has sealed its last state, and its node has copied it to the buddy, if it has one."""
        if self._folder is None or not self._number or self._failed or self._is_left_out:
            return False
        first_rank = self._communicator.first_rank_here
        return not self._has_buddy or states.copied_step(self._folder, first_rank) >= self._saved_step

    def _state_here(self, engine: Engine) -> int:
        """Return about the bytes of a state on this node, and of its copy for the node whose buddy it is."""
        whole, shard = bytes_of_state(engine)
        return whole + shard * self._communicator.ranks_here * (1 + self._has_buddy)

    def _sealed(self, engine: Engine, rows: int) -> states.RankState:
        point, tracker, cursors = self._point, self._tracker, self._tracker.cursors
        return states.RankState(
            attempt=point.attempt,
            nonce=point.nonce,
            head=self._manager.head,
            step=tracker.step,
            rank=self._communicator.rank,
            world_size=self._communicator.world_size,
            readers=self._communicator.coordinate.count,
            mesh=self._communicator.mesh.recorded(),
            engine=engine.name,
            loads_own_files=getattr(engine, "loads_own_files", False),
            leg=self._manager.leg_json,
            groups=list(tracker.groups),
            cursors=[] if cursors is None else cursors.tolist(),
            trained=[_trained(each) for each in (*self._manager.in_progress(), tracker)],
            rows=rows,
        )


def _trained(tracker: ReaderStateTracker) -> states.Trained:
    return states.Trained(
        since=tracker.committed_step,
        losses=list(tracker.losses),
        skipped=list(tracker.skipped),
        advances=repeatable(tracker.advances()),
    )


def bytes_of_state(engine: Engine) -> tuple[int, int]:
    """Return about the bytes of a state for the parameters that each rank has whole, and for this rank's shards of the rest.

    A user's adapter may name no parameters.
    """
    modules: Callable[[], Mapping[str, Any]] = getattr(engine, "modules", dict)
    whole = shard = 0
    for each in (each for part in modules().values() if isinstance(part, Module) for each in part.parameters()):
        # DeepSpeed leaves an empty tensor where it has partitioned one.
        local = each.to_local() if hasattr(each, "to_local") else getattr(each, "ds_tensor", None)
        per_weight = _STATE_PER_WEIGHT if each.requires_grad else 1
        if local is None:
            whole += per_weight * each.numel() * each.element_size()
        else:
            shard += per_weight * local.numel() * local.element_size()
    return whole, shard
