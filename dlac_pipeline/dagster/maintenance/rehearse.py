"""The job that rehearses runs, one op for each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster.assets.rehearsal import CHECK, RehearsedRun, judge_rehearsals, rehearsed
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.dagster.training_runs import MODEL
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.spec_problems import MOST_STEPS, Section

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

POOL = "rehearsals"
"""Pool whose limit is the number of simultaneous rehearsals. Each takes as many ranks as the run was trained on."""


class RehearseConfig(Section, dg.Config):
    """Runs to rehearse, and for how many steps."""

    runs: list[str] = Field(default=[])
    """Training runs. Empty: all that have committed a checkpoint within committed_within_h."""
    committed_within_h: float = Field(default=26.0, gt=0, le=87_600)
    """Hours within which a run must have committed a checkpoint to be rehearsed, if `runs` is empty."""
    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Steps to repeat. Unset: all up to the next checkpoint, at most 20."""
    sandbox: str = ""
    """Folder for the sandbox with a copy of the checkpoint. Empty: temporary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedRun:
    """One requested rehearsal."""

    run: str
    steps: int | None
    sandbox: str


@dg.op(out=dg.DynamicOut(RequestedRun), description="Runs to rehearse: the named ones, or those that trained recently.")
def runs_to_rehearse(
    context: dg.OpExecutionContext, config: RehearseConfig, lakehouse: LakehouseResource
) -> Iterator[dg.DynamicOutput[RequestedRun]]:
    """One output per run."""
    since = datetime.now(UTC) - timedelta(hours=config.committed_within_h)
    runs = config.runs or _trained_since(lakehouse.lakehouse(), since)
    if not runs:
        context.log.info(f"no run has committed a checkpoint within {config.committed_within_h:g} hours")
    for index, run in enumerate(runs):
        request = RequestedRun(run=run, steps=config.steps, sandbox=config.sandbox)
        yield dg.DynamicOutput(request, mapping_key=f"{re.sub(r'[^A-Za-z0-9_]', '_', run)}_{index}")


@dg.op(
    pool=POOL,
    description="Restores a run's checkpoint in a sandbox, repeats the steps after it, and compares the losses.",
)
def rehearsal(context: dg.OpExecutionContext, request: RequestedRun, lakehouse: LakehouseResource) -> RehearsedRun:
    """Return the result. A rehearsal that differs does not stop those of other runs."""
    folder = Path(request.sandbox) if request.sandbox else None
    done = rehearsed(lakehouse.lakehouse(), request.run, steps=request.steps, sandbox_folder=folder)
    (context.log.error if done.holds is False else context.log.info)(f"{done.run}: {done.summary}")
    return done


@dg.op(description="Records the result of all rehearsals as the asset check rehearsal_identical of the model.")
def rehearsals_judged(
    context: dg.OpExecutionContext, done: list[RehearsedRun]
) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
    """One evaluation for all, as Dagster keeps one of a check in each of its runs."""
    result = judge_rehearsals(done)
    if all(each.holds is None for each in done):
        context.log.warning(f"no run could be rehearsed: {result.description}")
    else:
        yield dg.AssetCheckEvaluation(
            asset_key=MODEL,
            check_name=CHECK,
            passed=result.passed,
            severity=result.severity,
            description=result.description,
            metadata=result.metadata,
        )
    yield dg.Output(None)


def _trained_since(lakehouse: "Lakehouse", since: datetime) -> list[str]:
    """The runs that have committed a checkpoint since then."""
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    ledger = Ledger(lakehouse)
    newest = {run: ledger.rows(run, kinds=(CheckpointRow,))[-1:] for run in ledger.runs()}
    return [run for run, rows in newest.items() if rows and rows[0].committed_at >= since]


@dg.job(
    description="Rehearses runs in a sandbox during training. Losses that are not bit-identical fail the asset check."
)
def rehearse_job() -> None:
    """One op per training run, and one for the verdict."""
    rehearsals_judged(runs_to_rehearse().map(rehearsal).collect())
