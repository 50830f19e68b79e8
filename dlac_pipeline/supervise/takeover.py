"""Right of this node to lead the run's next attempt: the run's lock, a courtesy, and the attempt that the fence replaces."""

from contextlib import ExitStack, suppress
from functools import partial

import tenacity

from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.commits import check_current, check_unfinished
from dlac_pipeline.lakehouse.ledger.plans import PlanRow
from dlac_pipeline.lakehouse.ledger.run_rows import claim_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, ClaimRow, FinishRow
from dlac_pipeline.supervise.claims import to_replace
from dlac_pipeline.supervise.liveness.launch_liveness import refuse_if_alive_elsewhere
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.supervision import Supervision


class Takeover:
    """Right of this node to lead the run's next attempt."""

    def __init__(self, supervision: Supervision) -> None:
        self.replaces = supervision.request.replaces
        """The attempt that the next one replaces, or None for the current attempt at the claim."""
        self.plans: tuple[PlanRow, ...] = ()
        """Plan of each source that the request names, once `lead` has returned."""
        self.holds_lock = False
        self._supervision = supervision
        self._request = supervision.request
        self._spec = supervision.spec
        self._lock = ExitStack()
        self._has_followed = False

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def follow(self) -> None:
        """Release the lock, because another node leads the next attempt."""
        self.close()
        self.holds_lock, self._has_followed = False, True

    def lead(self) -> bool:
        """Refuse or replace another launch of the run. Return True if other nodes have led since this node led last.

        This node keeps the lock until another node leads. Where nodes share the local folder, a leader that was cut off may
        still hold the lock. Followers do not wait for it. Raise `RunBusy` if another launch is alive, and a takeover was not
        requested, `RunFinished`, or `SteppedAside` if another launch owns the run.
        """
        has_followed = self._has_followed
        if not self.holds_lock or self._spec.launch.max_nodes > 1:
            self._choose_target()
            if not self.holds_lock:
                self._acquire_lock()
        self._has_followed = False
        return has_followed

    def replace_late_claim(self) -> bool:
        """Replace a claim that the orchestrator's dead run made late. Return False if there is none."""
        before = self.replaces or 0
        late = self._to_replace(before)
        self.replaces = self.replaces if late == before else late
        return late != before

    def others_resumed(self, round_: Round, err: errors.DlacError) -> bool:
        """Return True if nodes of this rendezvous resumed the run while this leader was cut off. It joins them again."""
        rendezvous = self._spec.launch.rendezvous
        if isinstance(err, errors.CatalogUnreachable):
            return round_.cut_off
        if not rendezvous or not isinstance(err, errors.SteppedAside):
            return False
        ledger = self._supervision.ledger
        attempt = self._retry(ledger.state, self._spec.run).fence.attempt
        return rendezvous == claim_of(self._retry(ledger.rows, self._spec.run, kinds=(ClaimRow,)), attempt).rendezvous

    def check_unfinished(self) -> None:
        """Raise RunFinished if another launch has ended the run. A catalog that does not answer proves nothing."""
        with suppress(errors.LakehouseError):
            check_unfinished(self._supervision.ledger.state(self._spec.run))

    def finish_of_run(self) -> tuple[int, int]:
        """Return the attempt and the step at which the run was finished."""
        finish = self._retry(lambda: self._supervision.ledger.rows(self._spec.run, kinds=(FinishRow,))[-1])
        return finish.attempt, finish.step

    def _acquire_lock(self) -> None:
        request, spec = self._request, self._spec
        if self.replaces is None and not self._has_followed:
            rows = partial(self._retry, self._supervision.ledger.rows, spec.run, kinds=HEAD_KINDS)
            refuse_if_alive_elsewhere(
                rows, spec, launched_by=request.launched_by, wait_s=request.wait_s, stop=self._supervision.stops.stop
            )
        lock = run_lock(
            spec.checkpoint.local,
            spec.run,
            wait_s=request.wait_s,
            takeover=request.takeover or self._has_followed,
            may_replace=self._choose_target,
            stop=self._supervision.stops.stop,
        )
        self._lock.enter_context(lock)
        self.holds_lock = True

    def _choose_target(self) -> None:
        """Fix the attempt to replace before any wait. So a second launch steps aside, and fences none off."""
        state = self._retry(self._supervision.ledger.state, self._spec.run)
        check_unfinished(state)
        if not self.plans:
            row = self._supervision.plans.row  # a run that resumes has plans of its own, and checks their pins
            self.plans = tuple(self._retry(row, plan_id) for plan_id in self._request.plan_ids)
        target = state.fence.attempt if self._request.takeover and self.replaces is None else self.replaces
        if target is not None:
            target = self._to_replace(target, rendezvous=self._spec.launch.rendezvous)
        check_current(self._retry(self._supervision.ledger.state, self._spec.run), target)
        self.replaces = target

    def _to_replace(self, wanted: int, *, rendezvous: str = "") -> int:
        """Return `wanted`, or the current attempt if this launch may replace it."""
        recovers = self._request.recovers
        if not rendezvous and not recovers:
            return wanted
        claims = self._retry(self._supervision.ledger.rows, self._spec.run, kinds=(ClaimRow,))
        return to_replace(claims, wanted, rendezvous=rendezvous, recovers=recovers)

    @property
    def _retry(self) -> tenacity.Retrying:
        outages = (errors.CatalogUnreachable, errors.StoreUnavailable)
        return self._supervision.retrying(*outages, replaces=self.replaces)
