"""Copies of a node's memory states on its buddy, the next node of the round on another host."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dlac_pipeline.extensions.buddies.server import STORE, TIMEOUT_S, home_of
from dlac_pipeline.extensions.buddies.transfer import Address, Connection, Sent, send_parts
from dlac_pipeline.memory_states import states

_LOOKS_PER_STATE = 20
"""Looks for a new state in the time between two."""
_LEAST_LOOK_S, _MOST_LOOK_S = 0.005, 0.05
_SLOWER = 1.05
"""Factor of the time between two looks after one that found nothing."""
RETRY_S = 0.1
LATER_S = 30.0
"""Seconds between two tries while the ranks do not wait for copies."""
_ALONE = "they are kept on this node only, and if it is lost, the last checkpoint is read"
_Mark = list[tuple[int, int]]


class BuddyCopies:
    """Copies of the states of this node's ranks in one attempt. Ranks keep a state only when the one before is copied."""

    def __init__(self, folder: Path, ranks: Sequence[int], buddy: Address | None, key: bytes) -> None:
        """`folder` is the attempt's. Without a buddy the ranks do not wait for copies."""
        self._folder = folder
        self._ranks = ranks
        self._buddy = buddy
        self._key = key
        self._marks: dict[int, _Mark] = {}
        """Seals of each slot whose state is copied, or older than the last copy."""
        self._sent: dict[int, Sent] = {}
        """Parts that the buddy has in each slot."""
        self.content_bytes = 0
        """Bytes of files that were sent."""
        self._copied_step = 0
        """Step of the last state that was copied."""
        self._is_alone = False
        """True while copies fail, and the ranks do not wait for them."""
        self._look_s = _MOST_LOOK_S

    def run(self, ended: threading.Event, *, patience_s: float, warn: Callable[[str], None]) -> None:
        """Copy each state once it is sealed, until `ended` is set. If that fails for `patience_s`, the ranks do not wait."""
        copied_at, failing_since = time.monotonic(), 0.0
        while not ended.wait(self._look_s):
            try:
                if not self.copy_new():
                    self._look_s = min(_MOST_LOOK_S, self._look_s * _SLOWER)
                    continue
            except Exception as err:  # the ranks wait for copies
                failing_since = failing_since or time.monotonic()
                if self._buddy is not None and time.monotonic() < failing_since + patience_s:
                    ended.wait(RETRY_S)
                    continue
                if not self._is_alone:
                    warn(f"expected to copy the states in memory to another node, found {err}: {_ALONE}")
                    self._is_alone = True
                with suppress(OSError):
                    states.mark_copied(self._folder, self._ranks[0], states.ALWAYS)
                ended.wait(LATER_S)
            else:
                now, failing_since, self._is_alone = time.monotonic(), 0.0, False
                self._look_s = min(_MOST_LOOK_S, max(_LEAST_LOOK_S, (now - copied_at) / _LOOKS_PER_STATE))
                copied_at = now

    def copy_new(self) -> bool:
        """Copy the newest state that is not copied. Return whether there is one. Raise `OSError` if that fails."""
        found = self._find_new()
        if found is not None:
            self._copy(*found)
        return found is not None

    def _find_new(self) -> tuple[Path, int, _Mark] | None:
        """Return the newest of the slots that all ranks of this node have sealed after the same step, and that are not noted."""
        newest: tuple[Path, int, _Mark] | None = None
        for number in range(states.SLOTS):
            slot = states.slot_of(self._folder, number)
            try:
                mark = marks_of_seals(slot, self._ranks)
                if mark != self._marks.get(number):
                    (step,) = {part.step for part in states.read_seals(slot, self._ranks)}
                    if newest is None or step > newest[1]:
                        newest = slot, step, mark
            except (OSError, ValueError):  # a rank has not sealed it
                continue
        return newest

    def _copy(self, slot: Path, step: int, mark: _Mark) -> None:
        """Copy a slot, and note that it is copied. Raise `OSError` if the buddy does not take it.

        A state older than the last copy is only noted: with its step as the mark, the ranks would wait for the last one again.
        """
        if step > self._copied_step:
            self._send(slot)
            states.mark_copied(self._folder, self._ranks[0], step)
            self._copied_step = step
        self._marks[int(slot.name[0])] = mark

    def _send(self, slot: Path) -> None:
        """Send a slot to the buddy. Raise `OSError` if the buddy does not take it.

        Ranks that do not wait for copies wait for this one, because they would overwrite the slot during a long copy. The wait
        has an end: the buddy has `TIMEOUT_S` for each piece, and after a failure `run` frees the ranks again.
        """
        if self._buddy is None:
            raise OSError("this node's buddy keeps no states in memory")
        with Connection.open(self._buddy, self._key, STORE, timeout_s=TIMEOUT_S) as connection:
            connection.send(slot=states.slot_name(slot), home=home_of(self._folder.parent), first_rank=self._ranks[0])
            if not connection.receive()["is_same"]:
                if self._is_alone:
                    states.mark_copied(self._folder, self._ranks[0], self._copied_step)
                number = int(slot.name[0])
                sent = send_parts(connection, slot, self._ranks, base=self._sent.pop(number, None))
                connection.receive()
                self._sent[number] = sent
                self.content_bytes += connection.content_bytes


def marks_of_seals(slot: Path, ranks: Sequence[int]) -> _Mark:
    """Return the identity and the time of each rank's seal. Raise `OSError` if one has no seal, or the slot is refused."""
    with states.opened(slot) as here:
        found = [os.stat(states.seal_file(slot, rank).name, dir_fd=here) for rank in ranks]
    return [(each.st_ino, each.st_mtime_ns) for each in found]
