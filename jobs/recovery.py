"""Global recovery: when the Dagster run of a training run dies, a sensor requests the recovery job."""

import time
from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.failures import NO_RECOVERY_TAG
from catalog.connect import connect
from catalog.errors import DlacError
from catalog.ledger import HEAD_KINDS, Ledger, RunState
from dlac_pipeline.recover.coordinator import launcher_of
from dlac_pipeline.spec import JobSpec, home_folder, parse_spec
from jobs.train import recover_job, train_job

_HEAD_TAG, _IN_A_ROW_TAG = "dlac/head", "dlac/recoveries_in_a_row"
"""On a recovery run: the head when it was requested, and how many were requested since the head last moved."""
WAIT_FOR_OLD_LAUNCH_S = 30.0
"""A supervisor whose Dagster run died leaves within this time, behind a checkpoint; then it is fenced off."""


@dg.run_failure_sensor(
    monitored_jobs=[train_job, recover_job],
    request_job=recover_job,
    minimum_interval_seconds=2,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Requests recover_job when a Dagster run that trains has died; leaves failures alone that would come again.",
)
def recovery_sensor(context: dg.RunFailureSensorContext) -> dg.RunRequest | dg.SkipReason:
    """One recovery per dead Dagster run; it replaces the attempt that is current now, unless that one is alive."""
    dead = context.dagster_run
    if NO_RECOVERY_TAG in dead.tags:
        return dg.SkipReason(
            f"run {dead.run_id} ended with {dead.tags[NO_RECOVERY_TAG]}: another attempt would end alike"
        )
    spec = _spec_of(dead.run_config)
    if spec is None:
        return dg.SkipReason(f"run {dead.run_id} has no job configuration: it died before it could train")
    fruitless = int(dead.tags.get(_IN_A_ROW_TAG, "0"))
    try:
        ledger = Ledger(connect(spec.lakehouse))
        rows, state = ledger.rows(spec.run, kinds=HEAD_KINDS), ledger.state(spec.run)
    except DlacError as err:
        # Dagster will not ask again about this run: what cannot be decided here, the job itself decides, cautiously.
        context.log.warning(f"the ledger cannot be read, requesting a recovery that fences nobody: {err}")
        launch: dict[str, Any] = {"takeover": False}
        head = dead.tags.get(_HEAD_TAG, "unknown")
    else:
        owner = launcher_of(rows, state.fence.attempt)
        if state.exists and not state.finished and not _is_over(context.instance, owner):
            return dg.SkipReason(
                f"attempt {state.fence.attempt} of {spec.run} belongs to launch {owner!r}: nothing to recover"
            )
        if _progressed(dead, state):
            fruitless = 0
        launch = {"takeover": True, "replaces": state.fence.attempt}
        head = str(state.fence.head)
    if fruitless >= spec.launch.attempts_without_progress:
        return dg.SkipReason(
            f"NoProgress: {fruitless} recoveries in a row of {spec.run} committed nothing; mend the cause"
        )
    launch |= {"wait_s": WAIT_FOR_OLD_LAUNCH_S, "noticed_by": "recovery_sensor", "noticed_at": time.time()}
    return dg.RunRequest(
        run_key=dead.run_id,
        run_config={"resources": dead.run_config["resources"], "ops": {"model_checkpoint": {"config": launch}}},
        tags={
            "dlac/run": spec.run,
            "dlac/recovers": dead.run_id,
            _HEAD_TAG: head,
            _IN_A_ROW_TAG: str(fruitless + 1),
        },
    )


def _progressed(dead: dg.DagsterRun, state: RunState) -> bool:
    """Whether a checkpoint was committed since the dead run was requested; a run that was not requested here counts."""
    return _HEAD_TAG not in dead.tags or dead.tags[_HEAD_TAG] != str(state.fence.head)


def _spec_of(run_config: Mapping[str, Any]) -> JobSpec | None:
    raw = run_config.get("resources", {}).get("job", {}).get("config", {}).get("spec")
    return None if raw is None else parse_spec(raw, origin="the dead run's configuration").resolved(home_folder())


def _is_over(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a launch is a Dagster run that has ended; one started by hand is its owner's business."""
    run = instance.get_run_by_id(run_id) if run_id else None
    return run is not None and run.is_finished
