"""Monitor of one attempt: it reads the heartbeats of all ranks."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.failure import HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder

OBSERVERS = Door("dlac.observers", "observer of heartbeats")
_STEP_EVENT_EVERY_S = 0.5


class Observer(Protocol):
    """An observer of the ranks in one attempt, made without arguments. All installed ones observe each attempt."""

    def observe(self, heartbeats: Sequence[RankHeartbeat]) -> Iterable[Event]:
        """Return events to publish. Called several times a second, with the newest heartbeats by rank."""


class AttemptMonitor:
    """Monitor of the heartbeats of one attempt: its step, its slow and hung ranks, and its recovery from a failure."""

    def __init__(self, recorder: RecoveryRecorder, launch: LaunchSpec, publish: Callable[[Event], None]) -> None:
        self.step = 0
        """Last step that all ranks have finished."""
        self.hangs = HangDetector(launch)
        self._recorder = recorder
        self._publish = publish
        self._observers: list[Observer] = [make() for make in OBSERVERS.load_all().values()]
        self._published_step = (0, 0)
        self._published_at = -math.inf

    def observe(self, heartbeats: Sequence[RankHeartbeat | None]) -> None:
        """Note the heartbeats of all ranks, once each rank has sent one."""
        known = [found for found in heartbeats if found is not None]
        if len(known) < len(heartbeats):
            return
        self.step = max(self.step, min(found.step for found in known))
        self._recorder.observe(known, self._publish)
        for observer in self._observers:
            for event in observer.observe(known):
                self._publish(event)
        first, now = known[0], time.monotonic()
        step = (first.step, first.loss_step)
        if first.loss_step and step != self._published_step and now - self._published_at >= _STEP_EVENT_EVERY_S:
            self._published_step, self._published_at = step, now
            self._publish({"event": "step", "step": first.step, "loss_step": first.loss_step, "loss": first.loss})
