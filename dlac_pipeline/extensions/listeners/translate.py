"""Typed events of a run, from the events of its supervisor or of rank 0, and from heartbeats of its ranks."""

import math
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.extensions.listeners.ledger_events import COMMANDS, read_events
from dlac_pipeline.lakehouse.ledger.recoveries import PHASES
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import read_heartbeats, rows_of_readers
from dlac_pipeline.supervise.ranks.rank_events import ENDINGS, Event
from dlac_pipeline.supervise.ranks.run_events import RUN_BEGUN, WENT_BACK


class EventTranslator:
    """Translator of one launch's events. It knows the current attempt and its uncommitted rows."""

    def __init__(self, spec: JobSpec, *, parent_run: str) -> None:
        self._spec = spec
        self._parent_run = parent_run
        self._started: events.AttemptStarted | None = None
        self._folder: Path | None = None
        self._is_open = False
        self._step = self._rows = self._committed_step = self._committed_rows = 0
        self._seen = (0.0, 0, 0)
        """Moment, rows and step of the last progress event."""

    def translate(self, event: Event) -> Iterator[events.RunEvent]:
        """Yield the typed events of an event."""
        kind = event["event"]
        if kind == "claimed":
            yield from self.end("lost", reason="another attempt followed", at=event["at"])
            if event["went_back"]:
                yield from read_events(self._spec, WENT_BACK, attempts=event["went_back"])
            if event["resumed_from"] and not event["head_step"]:
                yield from read_events(self._spec, RUN_BEGUN)
            yield self._start(event)
        elif kind in COMMANDS:
            yield from read_events(
                self._spec, kind, **{name: event[name] for name in ("attempts", "checkpoints") if name in event}
            )
        elif self._started is None:
            return
        elif kind == "checkpoint":
            yield from self.poll()
            yield self._checkpoint(event)
        elif kind in ("recovered", "recovery_failed"):
            yield self._recovery(event)
        elif kind == "quarantine":
            yield self._quarantine(event)
        elif kind == "given_up":
            yield events.RunGivenUp(**self._facts(event), reason=event["reason"])
        elif kind in ENDINGS:
            yield from self.end(kind, step=event["step"], at=event["at"])
        elif kind == "closed":
            yield from self.end("stopped", at=event["at"])
        elif kind in ("failure", "error"):
            reason = event.get("cause") or event["message"]
            yield from self.end("failed", reason=reason, step=event.get("step"), at=event["at"])

    def end(
        self, ending: Any, *, reason: str = "", step: int | None = None, at: float | None = None
    ) -> list[events.RunEvent]:
        """Return the end of the current attempt, once."""
        if not self._is_open:
            return []
        last = self.poll()
        self._is_open = False
        facts = {**self._facts({"at": at or time.time()}), "step": self._step if step is None else step}
        return [*last, events.AttemptEnded(**facts, ending=ending, reason=reason)]

    def poll(self) -> list[events.RunEvent]:
        """Return the progress since the last call, from the heartbeats in the launch folder. None without further steps."""
        beats = read_heartbeats(self._folder) if self._folder is not None and self._is_open else []
        now, (before, rows_before, step_before) = time.time(), self._seen
        step = min((each.step for each in beats), default=0)
        first = beats[0] if beats else None
        if first is None or self._started is None or step <= step_before:
            return []
        # Under torchrun this node has the heartbeats of its own ranks only.
        rows = rows_of_readers(beats, world_size=self._started.world_size, mesh=self._spec.launch.mesh)
        self._seen, self._step, self._rows = (now, rows, step), step, rows
        seconds = max(1e-3, now - (before or first.spent.began or now))
        tokens = (step - step_before) * self._spec.order.batch_size * self._spec.sequences.length
        progress = events.ProgressMade(
            **self._facts({"at": now}),
            step=step,
            loss_step=first.loss_step,
            loss=first.loss if first.loss_step else math.nan,
            rows=rows,
            rows_at_risk=self._rows_at_risk(),
            rows_per_s=(rows - rows_before) / seconds,
            tokens_per_s=tokens / seconds if tokens else None,
        )
        return [progress]

    def _facts(self, event: Event) -> Any:
        assert self._started is not None, "an attempt starts before all else"
        return {"run": self._spec.run, "attempt": self._started.attempt, "at": event["at"]}

    def _start(self, event: Event) -> events.RunEvent:
        names = ("attempt", "at", "ledger", "world_size", "nodes", "step", "resumed_from", "branch")
        facts = {name: event[name] for name in names} | {"run": self._spec.run, "parent_run": self._parent_run}
        facts["branch_is_new"] = bool(event["went_back"])
        tables = tuple(events.InputTable(**table) for table in event["tables"])
        in_memory = (event["step"] - event["head_step"]) * self._spec.order.batch_size
        self._started = events.AttemptStarted(tables=tables, rows_at_risk=in_memory, **facts)
        self._folder = Path(event["folder"]) if event["folder"] else None
        self._is_open = True
        self._step, self._rows = event["step"], 0
        self._committed_step, self._committed_rows = event["head_step"], -in_memory
        self._seen = (0.0, 0, self._step)
        return self._started

    def _checkpoint(self, event: Event) -> events.RunEvent:
        assert self._started is not None, "checked before"
        names = [table.name for table in self._started.tables]
        self._committed_step = event["step"]
        self._committed_rows = min(self._rows, self._committed_rows + event["rows"])
        facts = ("step", "checkpoint_id", "location", "ledger_snapshot_id", "bytes", "duration_s")
        return events.CheckpointCommitted(
            **self._facts(event),
            **{name: event[name] for name in facts},
            rows_by_table=dict(zip(names, event["rows_by_source"], strict=True)),
            losses=tuple(event.get("losses", ())),
            rows_at_risk=self._rows_at_risk(),
        )

    def _rows_at_risk(self) -> int:
        """Return the rows of steps after the last checkpoint. A replica group may have worked on rows more than once."""
        found, steps = self._rows - self._committed_rows, self._step - self._committed_step
        if steps <= 0 or not self._spec.sequences.length:
            found = min(found, steps * self._spec.order.batch_size)
        return max(0, found)

    def _recovery(self, event: Event) -> events.RunEvent:
        phases, start = [], datetime.fromisoformat(event["failed_at"]).timestamp()
        for name in PHASES[:-1]:
            end = start + max(0.0, event[f"{name}_s"] or 0.0)
            phases.append(events.RecoveryPhase(name=name, start=start, end=end))
            start = end
        facts = {name: event[name] for name in ("outcome", "cause", "noticed_by", "rows_replayed")}
        # A slow catalog may have delayed it into the next attempt.
        about = {**self._facts(event), "attempt": event["attempt"]}
        return events.RecoveryEnded(**about, **facts, phases=tuple(phases))

    def _quarantine(self, event: Event) -> events.RunEvent:
        facts = {"reason": event["reason"], "path": event.get("path", ""), "row_group": event.get("row_group")}
        facts |= {"rows": event.get("rows") or len(event.get("positions", ())) or None}
        return events.RowsQuarantined(**self._facts(event), **facts, is_tentative=bool(event.get("tentative")))
