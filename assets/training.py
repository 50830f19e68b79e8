"""The training run as an asset: its checkpoints are observations while it trains, its model the materialization."""

import base64
from typing import Any

import dagster as dg
from pydantic import Field

from assets.failures import failure, told_to_dagster
from assets.planning import metadata_of_this_run, work_plan
from assets.resources import JobResource
from assets.supervised import supervised
from catalog.errors import RunFinished
from catalog.ledger import Ledger
from dlac_pipeline.audit.plots import coverage_png, loss_curve_png
from dlac_pipeline.recover.status import run_status
from dlac_pipeline.spec import JobSpec
from dlac_pipeline.supervisor import Request


class LaunchConfig(dg.Config):
    """How this launch takes the run over; the defaults start a run, or resume one that nobody is training."""

    replaces: int | None = Field(
        default=None, description="The failed attempt that is recovered; unset: the current one."
    )
    takeover: bool = Field(
        default=False, description="Fence off a launch that is still alive, instead of being refused."
    )
    wait_s: float = Field(default=0.0, description="Seconds to wait for another launch to leave.")
    noticed_by: str = Field(default="operator", description="Who noticed the failure.")
    noticed_at: float | None = Field(
        default=None, description="When, in seconds since the epoch; unset: when the launch begins."
    )


@dg.asset(
    deps=[work_plan],
    group_name="training",
    kinds={"pytorch", "deepspeed", "iceberg"},
    description="One committed checkpoint of the model per ledger commit; each names exactly the rows it has consumed.",
)
def model_checkpoint(
    context: dg.AssetExecutionContext, config: LaunchConfig, job: JobResource
) -> dg.MaterializeResult[None]:
    """Train until the run is finished, or asked to stop."""
    with told_to_dagster(context):
        spec = job.job_spec()
    context.instance.add_run_tags(context.run_id, {"dlac/run": spec.run})
    planned = metadata_of_this_run(context, work_plan.key)
    request = Request(
        spec=spec,
        plan_ids=tuple(planned["plan_id"].split(", ")) if planned.get("is_new") else (),
        repin=config.replaces is None,
        replaces=config.replaces,
        takeover=config.takeover,
        wait_s=config.wait_s,
        noticed_by=config.noticed_by,
        noticed_at=config.noticed_at,
        launched_by=context.run_id,
    )
    last: dict[str, Any] = {}
    for last in supervised(request):
        _show(context, last)
    if last["event"] == "error" and last["kind"] != RunFinished.__name__:  # recovering twice changes nothing
        raise failure(context, last["kind"], last["message"])
    with told_to_dagster(context):
        return dg.MaterializeResult(metadata=_summary(spec, job))


def _show(context: dg.AssetExecutionContext, event: dict[str, Any]) -> None:
    """An observation per committed checkpoint, chosen interval and preemption, a log line per other event."""
    if event["event"] == "checkpoint":
        metadata = {
            name: event[name]
            for name in ("run", "step", "loss", "rows", "checkpoint_id", "bytes", "reason", "duration_s")
        } | {f"{phase}_s": seconds for phase, seconds in event["phases"].items()}
        context.log_event(dg.AssetObservation(asset_key=context.asset_key, metadata=metadata))
    elif event["event"] in ("interval", "preempted"):
        metadata = {name: value for name, value in event.items() if name not in ("event", "at")}
        context.log_event(dg.AssetObservation(asset_key=context.asset_key, metadata=metadata))
    elif event["event"] == "step":
        context.log.debug(f"step {event['step']}: loss {event['loss']:.4f}")
    else:
        context.log.info(str(event))


def _summary(spec: JobSpec, job: JobResource) -> dict[str, Any]:
    lakehouse = job.lakehouse()
    state, status = Ledger(lakehouse).state(spec.run), run_status(lakehouse, spec.run)
    return {
        "run": spec.run,
        "step": status["step"],
        "state": status["state"],
        "attempts": state.fence.attempt,
        "head_checkpoint": state.fence.head or "(none)",
        "loss_curve": _picture("Loss on the surviving lineage", loss_curve_png(lakehouse, spec.run)),
        "coverage": _picture("Coverage of files and row groups", coverage_png(lakehouse, spec.run)),
    }


def _picture(title: str, png: bytes) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{base64.b64encode(png).decode()})")
