"""The job that rehearses runs, one op for each."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster.assets.rehearsal import rehearse_model
from dlac_pipeline.dagster.resources import LakehouseResource
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


@dg.op(out=dg.DynamicOut(dict), description="Runs to rehearse: the named ones, or those that trained recently.")
def runs_to_rehearse(
    context: dg.OpExecutionContext, config: RehearseConfig, lakehouse: LakehouseResource
) -> Iterator[dg.DynamicOutput[dict[str, Any]]]:
    """Arguments of `rehearse_model`, one output per run."""
    since = datetime.now(UTC) - timedelta(hours=config.committed_within_h)
    runs = config.runs or _trained_since(lakehouse.lakehouse(), since)
    if not runs:
        context.log.info(f"no run has committed a checkpoint within {config.committed_within_h:g} hours")
    sandbox_folder = Path(config.sandbox) if config.sandbox else None
    for index, run in enumerate(runs):
        arguments = {"run": run, "steps": config.steps, "sandbox_folder": sandbox_folder}
        yield dg.DynamicOutput(arguments, mapping_key=f"{re.sub(r'[^A-Za-z0-9_]', '_', run)}_{index}")


@dg.op(
    pool=POOL,
    out=dg.Out(dg.Nothing),
    description="Restores a run's checkpoint in a sandbox, repeats the steps after it, compares the losses, and records the "
    "result as the asset check rehearsal_identical of the run's model.",
)
def rehearsal(
    context: dg.OpExecutionContext, arguments: dict[str, Any], lakehouse: LakehouseResource
) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
    """Evaluate the check, unless the run cannot be rehearsed. One that differs does not stop the rehearsals of others."""
    result = rehearse_model(lakehouse.lakehouse(), **arguments)
    (context.log.info if result.passed else context.log.error)(f"{arguments['run']}: {result.description}")
    if result.passed or result.severity == dg.AssetCheckSeverity.ERROR:
        names = ("asset_key", "check_name", "passed", "severity", "description", "metadata")
        yield dg.AssetCheckEvaluation(**{name: getattr(result, name) for name in names})
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
    """One op per training run."""
    runs_to_rehearse().map(rehearsal)
