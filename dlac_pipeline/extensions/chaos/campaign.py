"""Faults on a run, from its start to its end: each strikes when it is due, and must be healed in time."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from dlac_pipeline.audit.wording import format_duration
from dlac_pipeline.extensions.chaos.chaos_job import ChaosJob
from dlac_pipeline.extensions.chaos.facts import Fault
from dlac_pipeline.extensions.chaos.faults import KINDS, PlannedFault, Schedule, draw_cascade
from dlac_pipeline.extensions.chaos.run_strikes import LOOKS_EVERY_S, RunStrikes
from dlac_pipeline.extensions.chaos.strikes import Struck, still_runs
from dlac_pipeline.extensions.chaos.supervised_nodes import RunProgress, SupervisedNodes
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.ledger.ledger import Ledger

_FOLLOWS_WITHIN_S = 0.5
"""Greatest time from the start of new ranks to the next strike of a cascade."""
_ENDS_WITHIN_S = 60.0
"""Seconds for all further nodes to end once the run is finished."""
_TARGETS = {"checkpoint": "two checkpoints of the lineage", "store": "the run's folder in the checkpoint store"}
"""Kind of a fault -> its target, of the kinds that need more than ranks that train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosPlan:
    """The faults of a campaign, and its limits."""

    schedule: Schedule
    kinds: Sequence[str]
    """Kinds of faults, also of those in cascades."""
    cascade: int
    """Faults in a row: the first one, and others during the recovery from it."""
    away_s: float
    """Seconds for which catalog, store or network are unavailable."""
    healed_within_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wound:
    """A fault that is not healed yet."""

    fault: Fault
    struck: Struck
    ranks: frozenset[psutil.Process]
    """Living ranks before it. None before an outage, in which ranks may train on."""
    folders: frozenset[Path]
    """Launch folders before it."""
    attempts: int
    """Attempts before it."""
    step: int
    """Last step that any rank had finished when it ended. A struck replica group that is still dead has no later one."""
    needs_attempt: bool


class ChaosCampaign:
    """Faults on one run. `faults` has the faults that have struck, also if `run` raises."""

    def __init__(
        self, job: ChaosJob, nodes: SupervisedNodes, ledger: Ledger, plan: ChaosPlan, *, say: Callable[[str], None]
    ) -> None:
        """`ledger` is connected without a proxy. `say` shows a line."""
        self.faults: list[Fault] = []
        self._nodes, self._plan, self._say, self._spec = nodes, plan, say, job.spec
        self._strikes = RunStrikes(job, nodes, ledger, away_s=plan.away_s, tend=self._tend_outage, say=say)
        self._progress = RunProgress()
        self._wounds: list[_Wound] = []

    def run(self) -> None:
        """Train the run to its end, strike it, and wait for the healing of each fault.

        Raises:
            SpecInvalid: the run ends before a listed fault is due, or before any fault.
            TrainingFailed: a fault is not healed in time.
            DlacError: the run ends with this error.
        """
        schedule = self._plan.schedule
        self._nodes.start()
        while not (self._progress.trains or self._nodes.is_finished):
            self._tend()
        began = healthy_since = time.time()
        self._check_steps()
        while not (schedule.is_over or self._nodes.is_finished):
            self._tend()
            now, step = time.time(), self._progress.step
            due = schedule.take_due(step, trained_s=now - began, healthy_s=now - healthy_since)
            if due is not None:
                self._strike_in_a_row([due, *draw_cascade(due, self._plan.kinds, self._plan.cascade)])
                healthy_since = time.time()
        self._finish()
        if schedule.listed or not self.faults:
            raise SpecInvalid(
                f"expected {len(self.faults) + max(1, len(schedule.listed))} faults before the run ends, found that it ended at "
                f"step {self._progress.step} after {len(self.faults)}: let them strike earlier, or train more steps"
            )

    def _check_steps(self) -> None:
        """Raise `SpecInvalid` for a fault after the last step of the run."""
        last = self._nodes.total_steps
        late = [each.at_step for each in self._plan.schedule.listed if last and (each.at_step or 0) >= last]
        if late:
            raise SpecInvalid(
                f"expected faults before the last step of the run, {last}, found one at step {late[0]}: name an earlier step"
            )

    def _finish(self) -> None:
        """Wait for the end of the run."""
        deadline = 0.0
        while self._nodes.running:
            self._tend()
            if self._nodes.is_finished:
                deadline = deadline or time.monotonic() + _ENDS_WITHIN_S
                if time.monotonic() > deadline:
                    raise TrainingFailed(
                        f"expected all nodes to end within {_ENDS_WITHIN_S:.0f} s of the run, found some that still run:\n"
                        f"{self._nodes.last_lines()}"
                    )

    def _tend(self) -> None:
        """Let the nodes be started again, and note the progress. Only a fault that is not healed explains an end."""
        try:
            self._nodes.tend(excused=bool(self._wounds))
        except DlacError as err:
            if not self._wounds:
                raise
            raise type(err)(f"{self._unhealed()}: {type(err).__name__}: {err}") from err
        self._note_progress()

    def _tend_outage(self) -> None:
        """Note the progress. A node that has ended is started again after the outage."""
        self._nodes.tend(excused=True, starts=False)
        self._note_progress()

    def _note_progress(self) -> None:
        progress = self._nodes.progress()
        if progress.folder is not None:  # ranks that start have finished no step
            self._progress = progress if progress.trains else replace(progress, step=self._progress.step)

    def _strike_in_a_row(self, planned: Sequence[PlannedFault]) -> None:
        """Strike, strike again during the recovery, and wait until all is healed."""
        for fault in planned:
            if self._wounds:
                self._wait_for_recovery(random.Random(fault.seed))
            elif fault is not planned[0]:  # the first one has not struck
                return
            if self._nodes.is_finished:
                self._say(f"the run has ended before fault {len(self.faults) + 1}, {fault.kind}, could strike")
            self._strike(fault)
        for wound in self._wounds:
            self._heal(wound)
        self._wounds.clear()

    def _wait_for_recovery(self, chance: random.Random) -> None:
        """Wait until new ranks have replaced the ranks that must end, or the run has recovered, and then for a moment.

        All ranks of a struck attempt must end. Of replica groups only the struck ones must.
        """
        before = {rank for wound in self._wounds for rank in wound.ranks}
        ending = {
            process
            for wound in self._wounds
            for process in (wound.ranks if wound.needs_attempt else frozenset(wound.struck.processes))
        }

        def recovers() -> bool:
            ranks = set(self._nodes.ranks().values())
            is_replaced = ranks.isdisjoint(ending) and not ranks <= before
            return is_replaced or not any(map(self._missing, self._wounds))

        self._tend_until(recovers)
        until = time.monotonic() + chance.uniform(0.0, _FOLLOWS_WITHIN_S)
        while time.monotonic() < until:
            self._tend()

    def _strike(self, planned: PlannedFault) -> None:
        """Strike as soon as there is a target. A listed fault waits until the run ends, a drawn one for a limited time."""
        chance = random.Random(planned.seed)
        deadline = time.monotonic() + self._plan.healed_within_s
        while not self._nodes.is_finished:
            folders, attempts, step = self._nodes.launch_folders(), self._nodes.attempts, self._progress.step
            ranks = frozenset(self._nodes.ranks().values())
            if struck := self._try_strike(planned, chance):
                self._note(planned.kind, struck, step=step, ranks=ranks, folders=folders, attempts=attempts)
                return
            if time.monotonic() > deadline and not planned.is_listed:
                needed = _TARGETS.get(planned.kind, "ranks that train")
                missed = (
                    f"expected a target of fault {len(self.faults) + 1} ({planned.kind}) within "
                    f"{format_duration(self._plan.healed_within_s)}, found none: it needs {needed}"
                )
                if self._wounds:
                    raise TrainingFailed(f"{missed}, and {self._unhealed()}\n{self._nodes.last_lines()}")
                self._say(f"{missed}. It is left out")
                return
            self._tend()
        if planned.is_listed:
            self._plan.schedule.listed.append(planned)

    def _try_strike(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        """Strike, or return None if there is no target now. Raise `TrainingFailed` if this node does not allow it."""
        try:
            return self._strikes.strike(planned, chance)
        except psutil.NoSuchProcess:  # it has ended between the check and the strike
            return None
        except (OSError, IndexError, psutil.Error) as err:
            raise TrainingFailed(
                f"expected to inject fault {len(self.faults) + 1} ({planned.kind}), found {type(err).__name__}: {err}: fix the "
                "cause, or leave this kind out"
            ) from err

    def _note(
        self,
        kind: str,
        struck: Struck,
        *,
        step: int,
        ranks: frozenset[psutil.Process],
        folders: frozenset[Path],
        attempts: int,
    ) -> None:
        """Note a fault that has struck."""
        replicas = self._spec.launch.replicas > 0
        fault = Fault(
            number=len(self.faults) + 1,
            kind=kind,
            run=self._spec.run,
            mode="replicas" if replicas else self._spec.checkpoint.mode,
            step=step,
            what=struck.what,
            during=self._wounds[-1].fault.number if self._wounds else None,
            struck_at=struck.at,
            lifted_at=struck.lifted_at,
            runs=[self._spec.run],
        )
        self.faults.append(fault)
        self._say(f"fault {fault.number}, {kind} at step {step}: {struck.what}")
        wound = _Wound(
            fault=fault,
            struck=struck,
            ranks=ranks if KINDS[kind].new_attempt else frozenset(),
            folders=folders,
            attempts=attempts,
            step=max(self._progress.step, self._nodes.progress().furthest),
            needs_attempt=KINDS[kind].new_attempt and not (KINDS[kind].survived and replicas),
        )
        self._wounds.append(wound)

    def _heal(self, wound: _Wound) -> None:
        """Wait until a fault is healed."""
        self._tend_until(lambda: not self._missing(wound))
        fault, now, at = wound.fault, time.time(), self._progress.at
        has_stepped, attempts = at > wound.struck.lifted_at, self._nodes.attempts - wound.attempts
        if not KINDS[fault.kind].new_attempt:
            self._wait_for_commit(wound)
        fault.attempts, fault.recovery_s = attempts, round((min(at, now) if has_stepped else now) - fault.struck_at, 2)
        first = "a new step" if has_stepped else "the end of the run"
        self._say(f"fault {fault.number} is healed: {first} after {format_duration(fault.recovery_s)}")

    def _wait_for_commit(self, wound: _Wound) -> None:
        """Wait until a commit has used catalog and store again after an outage. It may take long, while the run trains."""
        step, since = self._progress.step, time.monotonic()
        while not (self._nodes.is_finished or self._strikes.has_committed_since(wound.struck.lifted_at)):
            look_at = time.monotonic() + LOOKS_EVERY_S
            while time.monotonic() < look_at:
                self._tend()
            if self._progress.step > step:
                step, since = self._progress.step, time.monotonic()
            elif time.monotonic() > since + self._plan.healed_within_s:
                raise TrainingFailed(
                    f"{self._unhealed()}: no checkpoint was committed after it, and no step was finished for "
                    f"{format_duration(self._plan.healed_within_s)}; fix the cause\n{self._nodes.last_lines()}"
                )

    def _tend_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raise `TrainingFailed` if that takes longer than a healing may."""
        while not holds():
            if time.time() > self._wounds[-1].struck.lifted_at + self._plan.healed_within_s:
                raise TrainingFailed(
                    f"{self._unhealed()} within {format_duration(self._plan.healed_within_s)}: "
                    f"{self._missing(self._wounds[0])}; fix the cause, or raise --healed-within\n{self._nodes.last_lines()}"
                )
            self._tend()

    def _missing(self, wound: _Wound) -> str:
        """Return the missing condition of a healing. Empty if it is healed."""
        left = [process.pid for process in wound.struck.processes if still_runs(process)]
        if left:
            return f"processes {left} still run"
        now = self._progress
        is_new = now.folder not in wound.folders and now.trains
        continues = not wound.needs_attempt and now.step > wound.step
        if self._nodes.is_finished or (now.at > wound.struck.lifted_at and (is_new or continues)):
            return ""
        return f"no new step since step {wound.fault.step}, in {self._nodes.attempts - wound.attempts} attempts"

    def _unhealed(self) -> str:
        fault = self._wounds[0].fault
        return f"fault {fault.number} ({fault.kind}: {fault.what}) was not healed"
