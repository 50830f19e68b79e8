"""Copies of a node's memory states on its buddy, the node in the next place of the round."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dlac_pipeline.checkpoint.memory import states
from dlac_pipeline.checkpoint.memory.transfer import Address, Connection, send_parts
from dlac_pipeline.supervise.memory.server import TIMEOUT_S, home_of

_LOOKS_PER_STATE = 20
"""Looks for a new state in the time between two."""
_LEAST_LOOK_S, _MOST_LOOK_S = 0.005, 0.05
_RETRY_S = 0.1
_Mark = list[tuple[int, int]]


class BuddyCopies:
    """Copies of the states of this node's ranks in one attempt. Ranks keep a state only when the one before is copied."""

    def __init__(self, folder: Path, ranks: Sequence[int], buddy: Address | None, key: bytes) -> None:
        """`folder` is that of the attempt. Without a buddy the ranks do not wait for copies."""
        self._folder = folder
        self._ranks = ranks
        self._buddy = buddy
        self._key = key
        self._marks: dict[int, _Mark] = {}
        """Seals of each slot as they were copied last."""
        self._look_s = _MOST_LOOK_S

    def run(self, ended: threading.Event, *, patience_s: float, warn: Callable[[str], None]) -> None:
        """Copy each state once it is sealed, until `ended` is set. Give up if that fails for `patience_s`."""
        copied_at, failing_since, problem = time.monotonic(), 0.0, "this node's buddy keeps no states in memory"
        while not ended.wait(self._look_s):
            found = self._find_new()
            if found is None:
                continue
            slot, step, mark = found
            if self._buddy is not None:
                try:
                    self._copy(slot, self._buddy)
                except (OSError, ValueError) as err:
                    failing_since, problem = failing_since or time.monotonic(), str(err)
                    if time.monotonic() < failing_since + patience_s:
                        ended.wait(_RETRY_S)
                        continue
                else:
                    self._marks[int(slot.name[0])] = mark
                    states.mark_copied(self._folder, step)
                    now, failing_since = time.monotonic(), 0.0
                    self._look_s = min(_MOST_LOOK_S, max(_LEAST_LOOK_S, (now - copied_at) / _LOOKS_PER_STATE))
                    copied_at = now
                    continue
            states.mark_copied(self._folder, states.ALWAYS)
            warn(
                f"expected to copy the states in memory to another node, found {problem}: they are kept on this node only, and "
                "if it is lost, the last checkpoint is read"
            )
            return

    def _find_new(self) -> tuple[Path, int, _Mark] | None:
        """Return a slot that all ranks of this node have sealed after the same step, and that is not copied yet."""
        for number in range(states.SLOTS):
            slot = states.slot_of(self._folder, number)
            try:
                found = [states.seal_file(slot, rank).stat() for rank in self._ranks]
                mark = [(each.st_ino, each.st_mtime_ns) for each in found]
                if mark != self._marks.get(number):
                    seals = (states.seal_file(slot, rank).read_bytes() for rank in self._ranks)
                    steps = {states.parse_seal(seal).step for seal in seals}
                    if len(steps) == 1:
                        return slot, steps.pop(), mark
            except (OSError, ValueError):  # a rank has not sealed it
                continue
        return None

    def _copy(self, slot: Path, buddy: Address) -> None:
        with Connection.open(buddy, self._key, timeout_s=TIMEOUT_S) as connection:
            connection.send(op="store", slot=states.slot_name(slot), home=home_of(self._folder.parent))
            if not connection.receive()["is_same"]:
                send_parts(connection, slot, self._ranks)
                connection.receive()
