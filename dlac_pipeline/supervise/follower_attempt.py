"""An attempt on a node that follows: it starts its ranks, and the leader decides how the attempt ends.

In: the resume point from the leader. Out: the leader's verdict, or this node's own if the leader is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.store import storing, tiers_of
from dlac_pipeline.elastic.round import LEADER, RESUME, VERDICT, Round
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.supervise.attempt import Ending, Supervision, spec_for, start_local_ranks
from dlac_pipeline.supervise.claim import ResumePoint, new_nonce
from dlac_pipeline.supervise.distributed_verify import NodeVerifier
from dlac_pipeline.supervise.incident import Failure
from dlac_pipeline.supervise.ranks.all_ranks import ASKS, LEAVE, STOP, report_of
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup

_SAY_EVERY_S = 0.2
_LOOK_EVERY_S = 0.25
"""Seconds between two looks at this node's ranks. Announcements of the leader are read at once."""
_LEAVE_MARGIN_S = 5.0
"""Extra seconds for ranks past their deadline. The leader waits for them as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptVerdict:
    """The end of an attempt for all its nodes: one of the three fields, or none if only this node exits."""

    ending: Ending | None = None
    again: Failure | None = None
    """Failure after which all nodes gather for another attempt."""
    error: tuple[str, str] | None = None
    """Class and message of the error that ends the run on all nodes."""
    attempt: int = 0
    step: int = 0

    def words(self) -> dict[str, Any]:
        """Return the verdict as a message for the other nodes."""
        return asdict(self)

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> AttemptVerdict:
        """Return the verdict of a message."""
        again, error = words["again"], words["error"]
        return cls(
            ending=words["ending"],
            again=None if again is None else Failure(**again),
            error=None if error is None else (error[0], error[1]),
            attempt=words["attempt"],
            step=words["step"],
        )


class FollowerAttempt:
    """An attempt that another node leads. `attempt` is the last attempt of the run that this node knows of."""

    def __init__(self, supervision: Supervision, round_: Round, *, attempt: int) -> None:
        self._supervision = supervision
        self._round = round_
        self._spec = spec_for(supervision.spec, round_)
        self._folder = Path(self._spec.checkpoint.local) / self._spec.run / f"launch-{new_nonce()}"
        self._point: ResumePoint | None = None
        self._prover = NodeVerifier(round_, tiers_of(self._spec).files)
        self._attempt = attempt
        self._said_at = 0.0
        self._told_of_start = False
        self._asked_at: float | None = None

    def run(self) -> AttemptVerdict:
        """Run the whole attempt. No rank of this node is left when the call returns or raises."""
        ranks = start_local_ranks(self._spec, self._folder, self._round, self._supervision.starter)
        try:
            while True:
                self._say(ranks)
                self._resume()
                self._tell_of_start(ranks)
                verdict = self._round.announced(VERDICT)
                if verdict is not None:
                    self._round.acknowledge()
                    return AttemptVerdict.of(verdict)
                if self._round.cut_off or LEADER in self._round.lost_nodes():
                    return self._report_lost_leader(ranks)
                if self._asked_at is None and ranks.noticed:
                    self._supervision.leave()
                if self._supervision.stop.is_set() and self._asked_at is None:
                    self._asked_at = time.monotonic()
                    ranks.ask_to_stop()
                if (
                    self._asked_at is not None
                    and time.monotonic() > self._asked_at + self._spec.launch.leave_s + _LEAVE_MARGIN_S
                ):
                    return AttemptVerdict(attempt=self._attempt)
                self._round.wait(_LOOK_EVERY_S)
        finally:
            self._prover.close()
            ranks.end()

    def _say(self, ranks: RankGroup) -> None:
        if time.monotonic() < self._said_at + _SAY_EVERY_S:
            return
        self._said_at = time.monotonic()
        answers = bool(self._round.message_of(LEADER).get(ASKS))  # before the ranks are read
        asked = ""
        if self._supervision.stop.is_set():
            asked = LEAVE if self._supervision.leaves.is_set() else STOP
        self._round.publish({**report_of(ranks, asked=asked, answers=answers), **self._prover.words})

    def _resume(self) -> None:
        if self._point is not None:
            return
        self._prover.look()
        told = self._round.announced(RESUME)
        if told is None:
            return
        self._prover.close()
        self._point = point = ResumePoint(**told)
        self._attempt = point.attempt
        with storing(self._folder):
            write_durably(self._folder / "resume.json", json.dumps(told).encode())

    def _tell_of_start(self, ranks: RankGroup) -> None:
        """Report the attempt once its ranks have started. Until then the ranks import, and this node follows the leader."""
        point, share = self._point, self._round.share
        if self._told_of_start or point is None or not ranks.is_started:
            return
        self._told_of_start = True
        event = {"event": "attempt", "attempt": point.attempt, "step": point.step, "pids": ranks.pids}
        self._tell(
            {**event, "leader": self._round.hosts[LEADER], "ranks": list(ranks.ranks), "world_size": share.world_size}
        )

    def _report_lost_leader(self, ranks: RankGroup) -> AttemptVerdict:
        """Report that the leader is lost. The next leader reads the progress from the ledger."""
        now = time.time()
        known = [found for found in ranks.progress() if found is not None]
        host = self._round.hosts[LEADER]
        which = "lost the rendezvous" if self._round.cut_off else f"lost node {host}, which led"
        failure = Failure(
            cause=f"attempt {self._attempt} {which}",
            noticed_by="supervisor",
            failed_at=now if self._round.cut_off else now - self._round.silent_s(LEADER),
            noticed_at=now,
            launched_at=now,
            stopped_at=now,
            last_step=max((found.step for found in known), default=0),
            began=min((found.spent.began for found in known), default=0.0),
            rows=sum(found.spent.rows for found in known) * self._round.share.world_size // max(1, len(known)),
        )
        self._tell({"event": "failure", "cause": failure.cause, "step": failure.last_step, "phase": failure.doing})
        return AttemptVerdict(again=failure, attempt=self._attempt)

    def _tell(self, event: dict[str, Any]) -> None:
        self._supervision.on_event({"run": self._spec.run, "attempt": self._attempt, **event})
