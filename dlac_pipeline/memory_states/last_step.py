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

import torch

from dlac_pipeline.checkpoint.engines import Engine, TorchState
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.step_gate import StepGate
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import RankState

_MOST_SHARE = 0.005
"""Share of a step that its hold may cost."""
_COSTS = 5
"""Number of last costs whose least one counts."""
_REST_STEPS = 50
_MOST_BYTES = 1 << 20


class LastStep:
    """The last finished step of one rank. `folder` is that of its attempt's memory states, on the node of all ranks."""

    def __init__(self, folder: Path, engine: TorchState, gate: StepGate, write: Callable[[Path, Any], int]) -> None:
        """`write` overwrites a file with a state, and returns its size."""
        self._folder, self._engine, self._gate, self._write = folder, engine, gate, write
        self._own: RankState | None = None
        """This rank's part. None: the step is not held."""
        self._versions: list[tuple[int, int]] = []
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._rested = 0
        """Steps that were not held because holds cost too much."""

    def forget(self) -> None:
        """Hold no step, because a later one is done."""
        self._own = None

    def hold(self, seal: Callable[[], RankState], losses: Sequence[float] | None, *, step_s: float) -> None:
        """Hold this rank's part, which `seal` makes, with `losses` of steps that it lacks, unless steps are too short for that.

        Without `losses`, because an accelerator computes them, nothing is held. Raise `OSError` if memory is full.
        """
        self._gate.request_batch()
        if losses is None or not self._gate.is_sure or self._is_dear(step_s):
            return
        began, own = time.monotonic(), seal()
        files, content = dict[str, Any](), io.BytesIO()

        def collect(path: Path, state: Any) -> None:
            files[str(path)] = state

        self._engine.save_own(Path(), collect)
        save_rng(Path(), own.rank, collect)
        changing = self._engine.changing() if own.rank == 0 else {}
        part = {"seal": states.pack_seal(own), "losses": list(losses), "files": files, "changing": changing}
        torch.save(part, content)
        if content.tell() <= _MOST_BYTES:
            states.hold_part(self._folder, own.rank, content.getvalue())
            self._own, self._versions = own, self._engine.versions()
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
        held = [load_tensors(states.held_file(self._folder, rank)) for rank in ranks]
        parts = [states.parse_seal(each["seal"]) for each in held]
        if {each.step for each in parts} != {own.step}:
            return
        slot.mkdir(mode=0o700, exist_ok=True)
        for rank in ranks:
            states.remove_seal(slot, rank)
        for part, each in zip(parts, held, strict=True):
            for name, state in each["files"].items():
                part.files.append((name, self._write(slot / name, state)))

        def write(path: Path, state: Any) -> None:
            parts[0].files.append((str(path.relative_to(slot)), self._write(path, state)))

        self._engine.save_equal(slot, write, held[0]["changing"])
        if self._engine.versions() != self._versions:
            return
        late = [sum(each) / own.world_size for each in zip(*(each["losses"] for each in held), strict=True)]
        last = parts[0].trained[-1]
        parts[0].trained[-1] = replace(last, losses=[*last.losses, *late])
        for part in parts:
            states.write_seal(slot, part)


def last_step_of(folder: Path, engine: Engine, gate: StepGate, write: Callable[[Path, Any], int]) -> LastStep | None:
    """Return the last step of a rank, or None if its state may differ from that of other ranks. Arguments as of `LastStep`."""
    if (
        isinstance(engine, TorchState) and type(engine).save is TorchState.save
    ):  # a class of the script's own may save more
        return LastStep(folder, engine, gate, write)
    return None
