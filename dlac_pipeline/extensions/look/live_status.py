"""Live status of a run: the ledger's rows, and the heartbeats that its ranks leave in the launch folder.

The launch folder is on the node where the run was launched. Without it only committed facts are known.
"""

import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlac_pipeline.audit.wording import format_duration
from dlac_pipeline.extensions.look.run_state import Standing, standing_of
from dlac_pipeline.lakehouse.errors import CommitConflict, LakehouseError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.plans import find_plan
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.lakehouse.ledger.run_rows import Fence, checkpoint_rows, claim_of, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, AdvanceRow, CheckpointRow, LedgerRow
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.supervise.claims import attempts_without_progress
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeats
from dlac_pipeline.supervise.ranks.rank_events import read_total_steps

_OF_ADVANCES = ("seq", "kind", "checkpoint_id", "attempt", "source", "pass", "plan_id", "rows_consumed")
_RATE_OVER_S = 15.0
"""Seconds over which steps per second are counted."""
_COUNTED_EVERY_S = 2.0
"""Seconds between two looks at the tables that a run follows."""
_SILENT_S = 30.0
"""Silence, in seconds, after which a rank is shown as silent instead of with its last phase."""


class LiveStatus:
    """Live status of one run, for repeated reads."""

    def __init__(self, lakehouse: Lakehouse, run: str) -> None:
        """Look up the run. Raises as `run_status`."""
        check_ledger(lakehouse, run)
        self._ledger = Ledger(lakehouse)
        self._run = run
        self._ledger.head_rows(run)  # raises NoSuchRun
        self._rows: list[LedgerRow] = []
        self._fence = Fence()
        self.finished = False
        self._advances: list[AdvanceRow] = []
        self._live_rows: dict[str, int] = {}
        self._steps: deque[tuple[float, int]] = deque()
        self._problem: str | None = None
        self._recoveries: list[Recovery] = []
        self._asked_attempt = -1
        self._table_rows, self._counted_at = 0, 0.0

    def look(self) -> dict[str, Any]:
        """Return the current facts by name. Names that end in `_s` are in seconds."""
        self._ask_ledger()
        now = time.time()
        head = checkpoint_rows(self._rows).get(self._fence.head or "")
        head_step = 0 if head is None else head.step
        claim = claim_of(self._rows, self._fence.attempt)
        folder = claim.launch_folder
        ranks = read_heartbeats(Path(folder)) if folder and not self.finished else []
        step = max(head_step, min((each.step for each in ranks), default=0))
        # Steps since the head may be of an earlier attempt, whose state in memory this one resumed from.
        inherits = claim.memory_step > head_step
        began = min((each.spent.began for each in ranks if each.spent.began and not inherits), default=None)
        committed_at = None if head is None else head.committed_at.timestamp()
        last_sign = max((each.at for each in ranks), default=None)
        in_danger_since = max((each for each in (committed_at, began) if each is not None), default=last_sign)
        at_risk_s = 0.0 if in_danger_since is None or last_sign is None else last_sign - in_danger_since
        leg = None if head is None else leg_of(self._rows, head.checkpoint_id)
        total = read_total_steps(Path(folder)) if folder else None
        standing = self._standing()
        rate = self._rate(ranks, now)
        steps_per_s = rate if standing.state == "training" else None
        return {
            "run": self._run,
            "state": _state(standing, ranks, now),
            "step": step,
            "total_steps": total,
            "loss": self._loss(head, ranks),
            "steps_per_s": None if steps_per_s is None else round(steps_per_s, 3),
            **self._speed(leg, steps_per_s),
            "consumed_share": self._consumed_share(ranks),
            "lag_rows": None if leg is None else self._lag(leg, now),
            "checkpoint_age_s": None if committed_at is None else round(now - committed_at, 1),
            "at_risk_steps": step - head_step,
            "at_risk_s": round(max(0.0, at_risk_s), 1) if step > head_step else 0.0,
            "attempt": self._fence.attempt,
            "attempts_without_progress": 0 if self.finished else attempts_without_progress(self._rows),
            "eta_s": None if not total or not steps_per_s else round(max(0, total - step) / steps_per_s, 1),
            "last_sign_s": None if last_sign is None else round(now - last_sign, 1),
            "problem": self._problem,
            "launch": standing.state,
            "launch_note": standing.note,
            "next_command": standing.next_command,
        }

    def _ask_ledger(self) -> None:
        """Read new rows of the ledger. An unavailable catalog is reported and asked again next time."""
        try:
            state = self._ledger.state(self._run)
            if state.fence != self._fence or state.finished != self.finished:
                known = self._fence.seq
                rows = self._ledger.rows_at(state, kinds=HEAD_KINDS, after=known)
                advances = self._ledger.rows_at(state, kinds=(AdvanceRow,), after=known, columns=_OF_ADVANCES)
                self._rows += rows
                self._advances += advances
                self._fence, self.finished = state.fence, state.finished
            self._problem = None
        except (LakehouseError, CommitConflict) as err:
            self._problem = str(err)

    def _standing(self) -> Standing:
        """Return the state of the last launch. If it has no process, read once per attempt if the run was given up."""
        standing = standing_of(self._rows, self._recoveries)
        if standing.state in ("dead", "silent") and self._asked_attempt != self._fence.attempt:
            with suppress(LakehouseError):
                self._recoveries = recoveries_of(self._ledger.lakehouse, self._run)
                self._asked_attempt = self._fence.attempt
                return standing_of(self._rows, self._recoveries)
        return standing

    def _rate(self, ranks: list[RankHeartbeat], now: float) -> float | None:
        """Return steps per second, counted from the first finished step of an attempt, which starts and loads before it."""
        if not any(each.spent.rows for each in ranks):
            self._steps.clear()
            return None
        step = min(each.step for each in ranks)
        if self._steps and step < self._steps[-1][1]:  # another attempt has begun
            self._steps.clear()
        self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[0][0] > _RATE_OVER_S:
            self._steps.popleft()
        (since, first), (until, last) = self._steps[0], self._steps[-1]
        return (last - first) / (until - since) if until > since else None

    def _speed(self, leg: Leg | None, steps_per_s: float | None) -> dict[str, float | None]:
        samples = None if leg is None or steps_per_s is None else round(steps_per_s * leg.batch_size, 1)
        tokens = None if leg is None or samples is None or not leg.sequences.length else samples * leg.sequences.length
        return {"samples_per_s": samples, "tokens_per_s": tokens}

    def _loss(self, head: CheckpointRow | None, ranks: list[RankHeartbeat]) -> float | None:
        if ranks and ranks[0].loss_step:
            return ranks[0].loss
        losses = () if head is None else head.losses
        return losses[-1] if losses else None

    def _consumed_share(self, ranks: list[RankHeartbeat]) -> float | None:
        """Return the committed share of the current passes, plus rows trained since. Further rows belong to the next pass."""
        lineage = set(lineage_of(self._rows, self._fence.head))
        mine = [row for row in self._advances if row.checkpoint_id in lineage]
        if not mine:
            return None
        last = {row.source: row.pass_index for row in sorted(mine, key=lambda row: row.pass_index)}
        current = [row for row in mine if row.pass_index == last[row.source]]
        plans = {(row.source, row.plan_id) for row in current}
        live = sum(max(self._live_rows_of(plan) for each, plan in plans if each == source) for source in last)
        committed = sum(row.rows_consumed for row in self._advances if row.attempt == self._fence.attempt)
        in_flight = max(0, sum(each.spent.rows for each in ranks) - committed)
        done = sum(row.rows_consumed for row in current) + in_flight
        return round((done % live or min(done, live)) / live, 4) if live else None

    def _lag(self, leg: Leg, now: float) -> int | None:
        """Return the rows of followed tables that no checkpoint has. None if some rows are not to be read, or it is unknown."""
        if not leg.following or any(source.exclude or source.row_filter for source in leg.sources):
            return None
        if now - self._counted_at > _COUNTED_EVERY_S:
            self._counted_at = now
            with suppress(LakehouseError, CommitConflict):
                found = [self._ledger.lakehouse.load(each.table).current_snapshot() for each in leg.sources]
                self._table_rows = sum(
                    int(each.summary["total-records"] or 0) for each in found if each and each.summary
                )
        lineage = set(lineage_of(self._rows, self._fence.head))
        return max(
            0, self._table_rows - sum(row.rows_consumed for row in self._advances if row.checkpoint_id in lineage)
        )

    def _live_rows_of(self, plan_id: str) -> int:
        if plan_id not in self._live_rows:
            plan = find_plan(self._ledger.lakehouse, plan_id)
            self._live_rows[plan_id] = 0 if plan is None else plan.live_rows
        return self._live_rows[plan_id]


def _state(standing: Standing, ranks: list[RankHeartbeat], now: float) -> str:
    """Return the phase of the slowest rank of a run that trains, and a silence of all of them, or the last launch's state."""
    if standing.state != "training" or not ranks:
        return "starting" if standing.state == "training" else standing.state
    furthest_behind = min(ranks, key=lambda each: (each.step, each.at))
    silent_s = now - max(each.at for each in ranks)
    silent = furthest_behind.phase != Phase.DONE and silent_s > _SILENT_S
    return f"{furthest_behind.doing}, no heartbeat for {format_duration(silent_s)}" if silent else furthest_behind.doing
