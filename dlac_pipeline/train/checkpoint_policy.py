"""Checkpoint policy of a rank: the steps at which it takes a checkpoint and exits, from messages that all ranks receive."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.interval import Interval, open_interval
from dlac_pipeline.checkpoint.manager import Committed
from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.launch_folder import notice_file, room_file, stop_file
from dlac_pipeline.elastic.ranks.rank import leave_reason
from dlac_pipeline.elastic.ranks.this_process import this_process
from dlac_pipeline.lakehouse.errors import Preempted
from dlac_pipeline.lakehouse.ledger.typed_rows import NODES
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.train.termination_notice import Notices

_log = logging.getLogger(__name__)


class CheckpointPolicy:
    """Checkpoint policy of one rank. `folder` is the launch folder, if a supervisor watches."""

    def __init__(
        self,
        spec: JobSpec,
        rank: int,
        folder: Path | None,
        events: EventWriter,
        *,
        ends_with_launcher: bool = True,
    ) -> None:
        """`ends_with_launcher`: without a supervisor, the end of the rank's launcher is a notice for all ranks."""
        local_rank = this_process().local_rank
        self._spec = spec
        self._rank = rank
        self._folder = folder
        self._events = events
        self._interval: Interval | None = None
        self._due = False
        self._step = 0
        self.head_step = 0
        """Step of the last checkpoint that this rank knows."""
        self._head: str | None = None
        self._age_s = 0.0
        """Age of the head when training begins, if the steps since are in memory."""
        self.leaving: StepSync | None = None
        """The message that requested the exit."""
        self._notices = Notices(
            spec.launch,
            local_rank=local_rank or 0,
            launched=folder is None and local_rank is not None and ends_with_launcher,
            on_deadline=self._too_late,
            notice_file=None if folder is None else notice_file(folder, rank),
            stop_file=None if folder is None else stop_file(folder, rank),
        )

    def resumed(self, point: ResumePoint) -> None:
        """Note that training resumes here."""
        self._step, self.head_step = point.step, point.head_step
        self._head = point.checkpoint_id
        # The interval has begun with the checkpoint, in an attempt before this one.
        if isinstance(point, FromMemory) and point.step > point.head_step:
            self._age_s = max(0.0, time.time() - point.head_at)
        if self._rank == 0:
            self._interval = open_interval(self._spec.checkpoint, point, time.monotonic())

    @property
    def is_asked(self) -> bool:
        """True once this rank was asked to stop."""
        return self._notices.first is not None

    def training(self) -> None:
        """Start the clock, just before the first batch is requested."""
        if self._interval is not None:
            self._interval.taken(time.monotonic() - self._age_s)
            self._report_interval(self._interval)

    def step_done(self, step: int, *, in_background: bool) -> RankReport:
        """Return this rank's report of the step that it has just finished. `in_background`: a checkpoint is in progress."""
        self._step = step
        if self._interval is not None:
            self._interval.step_done(time.monotonic(), in_background=in_background)
        return self.report(in_background=in_background)

    def report(self, *, in_background: bool) -> RankReport:
        """Return this rank's report now."""
        now, notice = time.monotonic(), self._notices.first
        report = RankReport() if notice is None else RankReport(notice=notice.name, notice_age_s=now - notice.at)
        if self._interval is None:
            return report
        needed_s = self._interval.needed_s(now, in_background=in_background)
        # The supervisor asks to make room only where nodes may join.
        folder = self._folder if self._spec.launch.max_nodes > 1 else None
        makes_room = folder is not None and os.access(room_file(folder), os.F_OK)
        return replace(report, due=self._interval.is_due(now), needed_s=needed_s, makes_room=makes_room)

    def on_sync(self, sync: StepSync) -> None:
        """Note a message that all ranks receive at this step."""
        self._due = self._due or sync.due
        if self.leaving is not None or not (sync.makes_room or sync.notice is not None):
            return
        self.leaving = sync
        if sync.notice is not None:
            self._notices.leave_by(time.monotonic() + self._spec.launch.deadline_s - sync.notice_age_s)

    def reason(self) -> str | None:
        """Return the reason for a checkpoint after this step, equal on all ranks, or None without a reason or without time."""
        settings = self._spec.checkpoint
        if self.leaving is not None:
            # Without an earlier checkpoint as a measure, the commit is tried. The watchdog ends one that takes too long.
            fits = self.leaving.notice_age_s + self.leaving.needed_s <= self._spec.launch.deadline_s
            return NODES if self.leaving.notice is None else self.leaving.notice if fits else None
        if settings.steps_between is not None and self._step % settings.steps_between == 0:
            return "steps"
        return ("auto" if settings.is_automatic else "seconds") if self._due else None

    def note(self, reason: str) -> Mapping[str, Any]:
        """Return the facts that the row of a checkpoint taken now records about it."""
        return {"reason": reason, **({} if self._interval is None else self._interval.note())}

    def taken(self) -> None:
        """Note that a checkpoint was taken, or passed on to be committed in the background."""
        self._due = False
        if self._interval is not None:
            self._interval.taken(time.monotonic())

    def committed(self, committed: Committed) -> None:
        """Note that a checkpoint is the head. Rank 0 learns its cost."""
        self._head, self.head_step = committed.checkpoint_id, committed.step
        if self._interval is not None:
            self._interval.committed(time.monotonic(), committed.phases)
            self._report_interval(self._interval)

    def left(self) -> None:
        """Note that all ranks are about to exit on request. To make room for nodes is no preemption."""
        if self._notice_name is not None:
            preemption = self._preemption()
            self._events.write(preemption)
            if self._rank == 0:
                _log.warning("run %r was %s", self._spec.run, preemption["message"])

    def close(self) -> None:
        """Cancel the deadline and restore the signal handlers."""
        self._notices.close()

    def _report_interval(self, interval: Interval) -> None:
        choice = interval.news()
        if choice is not None:
            news = {"interval_s": choice.interval_s, "why": choice.reason}
            self._events.write({"event": "interval", "step": self._step, **news})
            _log.info("a checkpoint every %.1f s of training: %s", choice.interval_s, choice.reason)

    @property
    def _notice_name(self) -> str | None:
        """The notice by which all ranks exit, or the notice that this rank received."""
        first = self._notices.first
        received = None if self.leaving is None else self.leaving.notice
        return received if received is not None or first is None else first.name

    def _preemption(self) -> dict[str, Any]:
        """Return the event of the preemption, with the steps that the next attempt repeats."""
        notice, deadline_s = str(self._notice_name), self._spec.launch.deadline_s
        lost_steps = self._step - self.head_step
        lost_rows = lost_steps * self._spec.order.batch_size
        head = "the start" if self._head is None else f"checkpoint {self._head!r} of step {self.head_step}"
        message = f"asked to exit ({notice}), within {deadline_s:g} s: "
        if lost_steps:
            message += f"no time for a checkpoint of step {self._step}; {head} stays the head, and {lost_steps} steps "
            message += f"({lost_rows} rows) must be repeated"
        else:
            message += f"{head} is committed, nothing is lost"
        facts = {"notice": notice, "deadline_s": deadline_s, "step": self._step, "committed": not lost_steps}
        return {"event": "preempted", **facts, "lost_steps": lost_steps, "lost_rows": lost_rows, "message": message}

    def _too_late(self) -> None:
        """Report the loss when the deadline ends this rank. A commit that has landed still counts."""
        preemption = self._preemption()
        _log.warning("rank %d of run %r was %s", self._rank, self._spec.run, preemption["message"])
        self._events.write(preemption)
        if self._folder is not None:
            leave_reason(Preempted(preemption["message"]))
