"""From a fault to its healing: strike, wait until all conditions hold, and record the course."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from benchmarks.soak_faults.choosing import KINDS, Choice
from benchmarks.soak_faults.lab import Lab
from benchmarks.soak_faults.strikes import STRIKES
from benchmarks.soak_faults.trainee import Seen, Trainee
from dlac_pipeline.extensions.chaos.facts import Fault
from dlac_pipeline.extensions.chaos.strikes import Struck, still_runs
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, TrainingFailed

HEALED_WITHIN_S = 300.0
"""Seconds from the end of a fault after which the campaign has failed."""
_FOUND_WITHIN_S = 300.0
"""Seconds that a fault waits for a run that it can strike. A run may have to start first."""
_PROMPT = "recovery_sensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wound:
    """A fault that is not healed yet."""

    fault: Fault
    struck: Struck
    trainees: Sequence[Trainee]
    before: Mapping[str, Seen]
    """State of the ledger before it, by run."""

    def needs_attempt(self, trainee: Trainee) -> bool:
        """Return whether an attempt of a struck run must follow."""
        kind = KINDS[self.fault.kind]
        return kind.new_attempt and not (kind.survived and trainee.has_replicas)


def strike(lab: Lab, choice: Choice, earlier: Wound | None) -> Wound:
    """Strike as soon as there is a target. `earlier` is the fault that is still being recovered from.

    Raises:
        TrainingFailed: no target appears in time.
    """
    chance = random.Random(choice.seed)
    time.sleep(chance.uniform(0.0, 3.0) if earlier else chance.uniform(0.0, 0.2))
    deadline = time.monotonic() + _FOUND_WITHIN_S
    while True:
        with suppress(psutil.NoSuchProcess):  # it may end between the check and the strike
            wound = _try_strike(lab, choice, earlier, chance)
            if wound is not None:
                return wound
        if time.monotonic() > deadline:
            raise TrainingFailed(
                f"expected a run for fault {choice.number} ({choice.kind}) within {_FOUND_WITHIN_S:.0f} s, found none: "
                f"{_standing(lab.trainees[-2:])}"
            )
        lab.tend()


def _try_strike(lab: Lab, choice: Choice, earlier: Wound | None, chance: random.Random) -> Wound | None:
    """Strike, if there is a target now."""
    training = lab.training()
    trainee = earlier.trainees[0] if earlier else training[choice.run % len(training)] if training else None
    if trainee is None:
        return None
    trainees = training if KINDS[choice.kind].every_run else [trainee]
    before = {one.run: one.seen() for one in trainees}
    step = trainee.live.step()
    struck = STRIKES[choice.kind](lab, trainee, chance)
    if struck is None:
        return None
    fault = Fault(
        number=choice.number,
        kind=choice.kind,
        run=trainee.run,
        mode=trainee.mode,
        step=step,
        what=struck.what,
        during=earlier.fault.number if earlier else None,
        struck_at=struck.at,
        lifted_at=struck.lifted_at,
        runs=[one.run for one in trainees],
    )
    return Wound(fault=fault, struck=struck, trainees=trainees, before=before)


def heal(lab: Lab, wound: Wound) -> None:
    """Wait until it is healed.

    Raises:
        TrainingFailed: it is not healed in time. The message has the missing condition.
    """
    deadline = wound.struck.lifted_at + HEALED_WITHIN_S
    looks: list[Callable[[], str]] = [
        lambda: _left(wound),
        lambda: "; ".join(filter(None, (_unreached(wound, one) for one in wound.trainees))),
        lambda: _silent(lab, wound),
    ]
    for look in looks:
        while missing := look():
            if time.time() > deadline:
                raise TrainingFailed(
                    f"fault {wound.fault.number} ({wound.fault.kind}: {wound.fault.what}) was not healed within "
                    f"{HEALED_WITHIN_S:.0f} s: {missing}; {_standing(wound.trainees)}"
                )
            lab.tend()
    wound.fault.recovery_s = round(_recovery_s(wound), 2)


def _left(wound: Wound) -> str:
    """Return the processes that should have ended and still run."""
    left = [process.pid for process in wound.struck.processes if still_runs(process)]
    return f"processes {left!r} are still there" if left else ""


def _unreached(wound: Wound, trainee: Trainee) -> str:
    """Return the step or attempt that a run has not reached yet."""
    before = wound.before[trainee.run].attempt
    try:
        seen = trainee.seen()
        if seen.finished:
            return ""
        if wound.needs_attempt(trainee) and seen.attempt <= before:
            return f"{trainee.run} has no attempt after {before}"
        head = trainee.head_row()
    except CatalogUnreachable as err:
        return f"the catalog is away: {err}"
    fresh = head is not None and head.committed_at.timestamp() > wound.struck.lifted_at
    if head is None or not fresh or (wound.needs_attempt(trainee) and head.attempt <= before):
        return f"{trainee.run} (attempt {seen.attempt}) has committed no checkpoint since"
    return ""


def _silent(lab: Lab, wound: Wound) -> str:
    """Return the sensors that have not run again, if they must."""
    if not KINDS[wound.fault.kind].sensors:
        return ""
    with lab.dagster.instance() as instance:
        for state in instance.all_instigator_state():
            if state.instigator_name == _PROMPT:
                ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, after=wound.struck.lifted_at)
                if any(tick.status.name in ("SKIPPED", "SUCCESS") for tick in ticks):
                    return ""
    return f"{_PROMPT} has not looked since"


def _recovery_s(wound: Wound) -> float:
    """Return the time until the first new step of the slowest run, or until now if the fault ends no attempt."""
    if not all(map(wound.needs_attempt, wound.trainees)):
        return time.time() - wound.struck.at
    firsts = []
    for trainee in wound.trainees:
        before = wound.before[trainee.run].attempt
        stamps = [
            entry["at"]
            for entry in trainee.entries()
            if entry["attempt"] > before and entry["at"] > wound.fault.struck_at
        ]
        firsts.append(min(stamps, default=time.time()))
    return max(firsts) - wound.fault.struck_at


def _standing(trainees: Sequence[Trainee]) -> str:
    """Return the runs' positions, for the message of a stuck campaign."""
    return "; ".join(f"{one.run}: {_seen(one)}, {one.live.progress()}" for one in trainees)


def _seen(trainee: Trainee) -> str:
    try:
        return str(trainee.seen())
    except CatalogUnreachable as err:
        return str(err)
