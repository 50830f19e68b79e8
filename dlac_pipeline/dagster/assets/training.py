"""A training run as two assets: its plan, and its model, whose checkpoints are observations while it trains."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import dagster as dg
from dagster._core.events import EngineEventData
from pydantic import Field

from dlac_pipeline.dagster import failures
from dlac_pipeline.dagster.assets.supervised import Event, supervise_run
from dlac_pipeline.dagster.heartbeat import Heartbeat
from dlac_pipeline.dagster.resources import HEARTBEAT
from dlac_pipeline.dagster.training_runs import NOT_RETRIED, TrainingRunDefinition, model_key, plan_key
from dlac_pipeline.lakehouse.errors import (
    LedgerError,
    LeftUnfinished,
    Preempted,
    RunBusy,
    RunFinished,
    SteppedAside,
    error_class,
)
from dlac_pipeline.spec.launch_request import OPERATOR, LaunchChoices, Request

POOL = "trainers"
"""Pool whose limit is the number of training runs that this Dagster instance trains at once. Without one, no limit."""

_CHECKPOINT = ("run", "step", "loss", "rows", "checkpoint_id", "bytes", "reason", "duration_s")
_UNDER_WAY = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


class LaunchConfig(LaunchChoices, dg.Config):
    """Takeover of the run by this launch, and overrides. The defaults start a run, or resume one that no launch is training."""

    overrides: dict[str, Any] = Field(default={})
    """Settings that replace settings of the job file, by their names there, such as `launch.world_size`."""


def build_plan(run: TrainingRunDefinition, **attributes: Any) -> dg.AssetsDefinition:
    """Return the asset `plans/<run>`: the pinned snapshots of the sources of a training run, and their work units."""

    def plan_run(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        with failures.as_failure(context):
            return dg.MaterializeResult(metadata=_plan(context, run))

    return dg.asset(
        plan_run,
        key=plan_key(run.name),
        description=f"One row per work unit (row group) of the snapshots that training run `{run.name}` reads. "
        "Tags pin them.",
        **attributes,
    )


def _plan(context: dg.AssetExecutionContext, run: TrainingRunDefinition) -> dict[str, Any]:
    """Pin and plan the snapshots of a new run. One that has begun keeps the plans of its leg. Return them as metadata."""
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.lakehouse.ledger.plans import get_plan
    from dlac_pipeline.lakehouse.ledger.run_rows import fence_of_rows
    from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
    from dlac_pipeline.plan.legs.choice import check_sources, plan_sources
    from dlac_pipeline.plan.legs.committed_leg import leg_of

    spec, lakehouse = run.job_spec(), run.lakehouse()
    rows = Ledger(lakehouse).rows(spec.run, kinds=HEAD_KINDS)
    head = fence_of_rows(rows).head
    if head is None:
        plans = [plan.row for plan in plan_sources(lakehouse, spec)]
    else:
        committed = leg_of(rows, head)
        check_sources(spec, committed)
        plans = [get_plan(lakehouse, source.plan_id) for source in committed.sources]
    for plan in plans:
        context.log.info(
            f"plan {plan.plan_id}: {plan.units} work units, {plan.live_rows} live rows of snapshot {plan.snapshot_id} of "
            f"{plan.source_table}, pinned by tag {plan.tag or '(no tag)'}"
        )
    return {
        "run": spec.run,
        "table": ", ".join(source.table for source in spec.sources),
        "snapshot_id": ", ".join(str(plan.snapshot_id) for plan in plans),
        "tag": ", ".join(plan.tag or "(no tag)" for plan in plans),
        "plan_ids": dg.MetadataValue.json([plan.plan_id for plan in plans]),
        "is_new": head is None,
        "work_units": sum(plan.units for plan in plans),
        "dagster/row_count": sum(plan.live_rows for plan in plans),
        "bytes": sum(plan.bytes for plan in plans),
        "row_filter": ", ".join(plan.row_filter or "(all rows)" for plan in plans),
    }


def build_model(run: TrainingRunDefinition, **attributes: Any) -> dg.AssetsDefinition:
    """Return the asset `models/<run>`, which trains a run."""

    def train_run(context: dg.AssetExecutionContext, config: LaunchConfig) -> Iterator[dg.MaterializeResult[None]]:
        yield from _train(context, config, replace(run, overrides=config.overrides))

    return dg.asset(
        train_run,
        key=model_key(run.name),
        deps=[plan_key(run.name)],
        output_required=False,
        required_resource_keys={HEARTBEAT},
        **attributes,
    )


def _train(
    context: dg.AssetExecutionContext, config: LaunchConfig, run: TrainingRunDefinition
) -> Iterator[dg.MaterializeResult[None]]:
    """Train until the run is finished, caught up, or preempted. A recovery that comes second makes nothing."""
    heartbeat: Heartbeat = getattr(context.resources, HEARTBEAT)
    is_tagged = context.run.tags.get(failures.RUN_TAG) == run.name
    try:
        if config.noticed_by == OPERATOR and not config.takeover:
            _refuse_if_trained(context, run.name, is_tagged=is_tagged)
    finally:
        if not is_tagged:  # launched by *Materialize* in the UI, whose job has no tags
            context.instance.add_run_tags(context.run_id, {**NOT_RETRIED, failures.RUN_TAG: run.name})
    with failures.as_failure(context):
        spec = run.spec_to_recover() if config.recovers else run.job_spec()
    run.kept.keep(spec)
    _link_recovery(context, config.recovers)
    request = Request(
        spec=spec,
        plan_ids=() if run.overrides else _new_plan_ids(context, run.name),  # that plan is of the job file
        repin=config.replaces is None,
        **{name: getattr(config, name) for name in LaunchChoices.model_fields},
        launched_by=context.run_id,
    )
    last, served = supervise_run(request, _Shown(context), on_asking=heartbeat.was_interrupted)
    kinds = (SteppedAside.__name__, RunBusy.__name__)
    if served.noticed_by != OPERATOR and last["event"] == "error" and last["kind"] in kinds:
        failures.tag_run(context, failures.STEPPED_ASIDE_TAG, last["kind"])
        context.log.info(last["message"])
        return
    try:
        _fail_if_unfinished(context, last)
    finally:
        if _has_ended(last):
            run.kept.forget(run.name)
    from dlac_pipeline.dagster.assets.pages import model_page

    with failures.as_failure(context):
        yield dg.MaterializeResult(metadata=model_page(run.lakehouse(), run.name))


def _new_plan_ids(context: dg.AssetExecutionContext, run: str) -> tuple[str, ...]:
    """Return the plans that this Dagster run has made for a run that has not begun. Empty without them."""
    entries = context.instance.all_logs(context.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    found = [entry.asset_materialization for entry in entries if entry.asset_materialization]
    made = [event.metadata for event in found if event.asset_key == plan_key(run)]
    return tuple(made[-1]["plan_ids"].value) if made and made[-1]["is_new"].value else ()


def _refuse_if_trained(context: dg.AssetExecutionContext, run: str, *, is_tagged: bool) -> None:
    """Refuse to train a run that another Dagster run trains. The queue cannot: it does not know what *Materialize* trains.

    Of two that are tagged, which only a queue without the limit starts, the first one trains.
    """
    under_way = dg.RunsFilter(tags={failures.RUN_TAG: run}, statuses=_UNDER_WAY)
    began = {each.dagster_run.run_id: each.start_time or 0.0 for each in context.instance.get_run_records(under_way)}
    mine = (began.get(context.run_id, math.inf), context.run_id)
    others = ((at, run_id) for run_id, at in began.items() if run_id != context.run_id)
    if trainers := [other for other in others if other < mine or not is_tagged]:
        message = f"Dagster run {trainers[0][1]} trains {run!r}: wait for its end, or launch with `takeover: true`"
        raise failures.failure(context, RunBusy.__name__, message)


def _link_recovery(context: dg.AssetExecutionContext, recovered: str) -> None:
    with suppress(Exception):  # a link must not keep a run from its recovery
        if dead := context.instance.get_run_by_id(recovered):
            link = EngineEventData({"recovery": dg.MetadataValue.dagster_run(context.run_id)})
            context.instance.report_engine_event(f"Recovered by run {context.run_id}", dead, link)


def _has_ended(last: Event) -> bool:
    """Return True if no recovery follows the last event of a supervisor."""
    if last["event"] != "error":
        return bool(last["ending"] != "stopped")
    known = error_class(last["kind"])
    if known is None or issubclass(known, LedgerError):  # the launch that fenced this one off may be alive
        return known is RunFinished
    return not known.transient


def _fail_if_unfinished(context: dg.AssetExecutionContext, last: Event) -> None:
    """Raise the error that ended the run. One that exited on a notice, without a request from here, will be resumed."""
    if last["event"] == "error":
        if last["kind"] != RunFinished.__name__:  # recovering twice changes nothing
            raise failures.failure(context, last["kind"], last["message"])
    elif last["ending"] == "left":
        message = f"the script ended after a checkpoint of step {last['step']}, before the end of the run"
        raise failures.failure(context, LeftUnfinished.__name__, message)
    elif last["ending"] == "stopped":
        if not failures.run_tag(context.instance.get_run_by_id(context.run_id), failures.PREEMPTED_TAG):
            failures.tag_run(context, failures.PREEMPTED_TAG, "supervisor")
        message = f"preempted: the run stopped after a checkpoint of step {last['step']}"
        raise failures.failure(context, Preempted.__name__, message)


class _Shown:
    """Shows the supervisor's events: an observation per committed checkpoint, interval and preemption, else a line of the log.

    The tag of a preemption, by which it is not taken for a person's cancel, is set first, and with the next event if that fails.
    """

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        self._context = context
        self._notice = ""

    def __call__(self, event: Event) -> None:
        context, kind = self._context, event["event"]
        facts = {name: value for name, value in event.items() if name not in ("event", "at", "asked")}
        if kind == "preempted" and "asked" not in event:  # else it was this process, for a person who cancels
            self._notice = event["notice"]
        if self._notice:
            failures.tag_run(context, failures.PREEMPTED_TAG, self._notice)
            self._notice = ""
        if kind == "checkpoint":
            facts = {name: event[name] for name in _CHECKPOINT}
            facts |= {f"{phase}_s": seconds for phase, seconds in event["phases"].items()}
        if kind in ("checkpoint", "interval", "preempted"):
            context.log_event(dg.AssetObservation(asset_key=context.asset_key, metadata=facts))
        elif kind == "step":
            loss = "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
            context.log.debug(f"step {event['loss_step']}: loss {loss}")
        else:
            shown = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "run")
            context.log.info(f"{kind}: {shown}")
