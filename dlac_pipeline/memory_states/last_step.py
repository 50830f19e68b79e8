"""The state after the last finished step, which a survivor of a failure writes (just-in-time checkpointing).

After each step a rank holds in shared memory what it alone knows. A survivor has the weights and moments, which are equal on all
ranks. See docs/design/0030-memory-states.md.
"""

import io
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlac_pipeline.checkpoint.engines import Engine, TorchState
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, plain_state
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.stage.watch import plain_tensors, whole
from dlac_pipeline.checkpoint.step_gate import StepGate
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import RankState

_MOST_SHARE = 0.005
"""Share of a step that its hold may cost."""
_COSTS = 5
"""Number of last costs whose least one counts."""
_REST_STEPS = 50
_LATE_S, _LOOK_S = 0.5, 0.01
"""Seconds for which the first rank that fails waits for others to hold the step."""
_SAMPLE_BYTES = 1 << 16
"""One number of so many bytes of a tensor shows whether a write to `.data`, which makes no version, has changed it."""
_MOST_BYTES = 1 << 20


class LastStep:
    """The last finished step of one rank. `folder` is that of its attempt's memory states, on the node of all ranks."""

    def __init__(self, folder: Path, engine: TorchState, gate: StepGate, write: Callable[[Path, Any], int]) -> None:
        """`write` overwrites a file with a state, and returns its size."""
        self._folder, self._engine, self._gate, self._write = folder, engine, gate, write
        self._own: RankState | None = None
        """This rank's part. None: the step is not held."""
        self._file: Path | None = None
        """The file of this rank's part, if it exists."""
        self._sample = _Sample()
        self._is_large = False
        """True if the part is too large, or a tensor is on an accelerator."""
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._rested = 0
        """Steps that were not held because holds cost too much."""

    def forget(self) -> None:
        """Hold no step, because a later one is done."""
        self._own = None

    def drop(self) -> None:
        """Hold no step any more, so that the supervisor waits for no survivor."""
        self._own = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def hold(self, seal: Callable[[], RankState], losses: Sequence[float | None] | None, *, step_s: float) -> None:
        """Hold this rank's part, which `seal` makes, with `losses` of steps that it lacks, unless steps are too short for that.

        Without `losses`, because an accelerator computes them, nothing is held.

        Raises:
            OSError: memory is full.
            SpecInvalid: the part contains something that could not be loaded again.
        """
        self._gate.request_batch()
        if losses is None or not self._gate.is_sure or self._is_large or self._is_dear(step_s):
            self.drop()
            return
        began, own = time.monotonic(), seal()
        files, content = dict[str, Any](), io.BytesIO()

        def collect(path: Path, state: Any) -> None:
            files[str(path)] = state

        self._engine.save_own(Path(), collect)
        save_rng(Path(), own.rank, collect)
        changing = self._engine.changing() if own.rank == 0 else {}
        tensors = self._engine.held_tensors()
        own_bytes = sum(each.nbytes for each in plain_tensors([files, changing]))
        self._is_large = own_bytes > _MOST_BYTES or any(each.device.type != "cpu" for each in tensors)
        if self._is_large:
            self.drop()
        else:
            part = {"seal": states.pack_seal(own), "losses": list(losses), "files": files, "changing": changing}
            torch.save(plain_state(part), content)
            self._file = states.hold_part(self._folder, own.rank, content.getvalue())
            self._sample.take(tensors)
            self._own = own
        self._costs.append(time.monotonic() - began)

    def _is_dear(self, step_s: float) -> bool:
        """Return whether holds cost too much. They are tried again after some steps."""
        if len(self._costs) < _COSTS or min(self._costs) <= _MOST_SHARE * step_s:
            return False
        self._rested = (self._rested + 1) % _REST_STEPS
        if not self._rested:
            self._costs.clear()
        return True

    def keep(self, slot: Path, *, after: int) -> None:
        """Write the whole state of the held step if it is after the step `after`, another rank does not, and nothing has changed.

        Raises:
            OSError: memory is full, or a rank has held nothing.
            DlacError: the state contains something that could not be loaded.
        """
        if not states.begin_keeping(self._folder):
            return
        with self._gate.before_step() as is_before:
            own, self._own = self._own, None
            try:
                if own is not None and own.step > after and is_before:
                    self._keep(own, slot)
            finally:
                states.end_keeping(self._folder)

    def _keep(self, own: RankState, slot: Path) -> None:
        ranks = range(own.world_size)
        until = time.monotonic() + _LATE_S
        while True:
            held = [load_tensors(states.held_file(self._folder, rank)) for rank in ranks]
            parts = [states.parse_seal(each["seal"]) for each in held]
            if all(each.step == own.step for each in parts):
                break
            if time.monotonic() > until:
                return
            time.sleep(_LOOK_S)
        slot.mkdir(mode=0o700, exist_ok=True)
        for rank in ranks:
            states.remove_seal(slot, rank)
        for part, each in zip(parts, held, strict=True):
            for name, state in each["files"].items():
                part.files.append((name, self._write(slot / name, state)))

        def write(path: Path, state: Any) -> None:
            parts[0].files.append((str(path.relative_to(slot)), self._write(path, state)))

        self._engine.save_equal(slot, write, held[0]["changing"])
        if not self._sample.is_same(self._engine.held_tensors()):
            return
        late = [_mean(each) for each in zip(*(each["losses"] for each in held), strict=True)]
        last = parts[0].trained[-1]
        parts[0].trained[-1] = replace(last, losses=[*last.losses, *late])
        for part in parts:
            states.write_seal(slot, part)


def _mean(losses: Sequence[float | None]) -> float:
    """Return the mean over the ranks that have a loss."""
    known = [each for each in losses if each is not None]
    return sum(known) / max(1, len(known))


class _Sample:
    """Versions, addresses and some numbers of plain tensors in host memory."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []
        self._views: list[np.ndarray[Any, Any]] = []
        self._numbers: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the tensors as they are."""
        marks = _marks(tensors)
        if [address for _, address in marks] != [address for _, address in self._marks]:
            self._views = [_view(each) for each in tensors if each.nbytes]
        self._marks, self._numbers = marks, np.concatenate([np.empty(0, np.uint8), *self._views])

    def is_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors are as they were."""
        numbers = np.concatenate([np.empty(0, np.uint8), *self._views])
        return _marks(tensors) == self._marks and np.array_equal(numbers, self._numbers)


def _marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(each._version, each.data_ptr()) for each in tensors]


def _view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return one number of so many bytes of a tensor's storage."""
    content = whole(tensor.untyped_storage()).numpy()
    words = len(content) // 8
    return content[: words * 8].view(np.int64)[:: _SAMPLE_BYTES // 8] if words else content


def last_step_of(folder: Path, engine: Engine, gate: StepGate, write: Callable[[Path, Any], int]) -> LastStep | None:
    """Return the last step of a rank, or None if its state may differ from that of other ranks. Arguments as of `LastStep`."""
    # a class of the script's own may save more
    is_plain = isinstance(engine, TorchState) and type(engine).save is TorchState.save
    return LastStep(folder, engine, gate, write) if isinstance(engine, TorchState) and is_plain else None
