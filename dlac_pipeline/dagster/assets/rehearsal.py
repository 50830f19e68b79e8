"""Rehearsal as an asset check: in a sandbox, the steps after a checkpoint have the losses that production recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster.metadata import table
from dlac_pipeline.dagster.resources import Job, JobResource
from dlac_pipeline.dagster.training_runs import MODEL, model_key
from dlac_pipeline.lakehouse import errors

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

CHECK = "rehearsal_identical"
_FACTS = ("checkpoint_id", "step", "successor", "attempt", "world_size", "compared", "restore_s", "replay_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRun:
    """Result of one training run's rehearsal."""

    run: str
    holds: bool | None
    """True if every loss is bit-identical. None: it could not be rehearsed, which proves nothing about its checkpoints."""
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


def rehearsed(
    lakehouse: "Lakehouse", run: str, *, steps: int | None = None, sandbox_folder: Path | None = None
) -> RehearsedRun:
    """Rehearse a run as it was trained. An error is part of the result."""
    from dlac_pipeline.operations.rehearse import rehearse_run

    try:
        done = rehearse_run(lakehouse, run, steps=steps, sandbox_folder=sandbox_folder)
    except (
        errors.NothingToRehearse,
        errors.NoSuchRun,
        errors.NoSuchJobSpec,
        errors.CatalogUnreachable,
        errors.StoreUnavailable,
    ) as err:
        return RehearsedRun(run=run, holds=None, summary=str(err))
    except errors.DlacError as err:
        return RehearsedRun(run=run, holds=False, summary=f"{type(err).__name__}: {err}")
    facts = {name: getattr(done, name) for name in _FACTS}
    return RehearsedRun(run=run, holds=done.identical, summary=done.summary(), facts=facts)


def judge_rehearsals(outcomes: Sequence[RehearsedRun], model: dg.AssetKey = MODEL) -> dg.AssetCheckResult:
    """One verdict on all of them: it holds if none differs or dies and at least one was rehearsed."""
    wrong = [each for each in outcomes if each.holds is False]
    right = [each for each in outcomes if each.holds]
    summaries = [f"{each.run}: {each.summary}" for each in wrong or right or outcomes]
    rows = [
        {"run": each.run, "identical": each.holds, "summary": each.summary}
        | {name: each.facts.get(name) for name in _FACTS}
        for each in outcomes
    ]
    return dg.AssetCheckResult(
        passed=bool(right) and not wrong,
        check_name=CHECK,
        asset_key=model,
        severity=dg.AssetCheckSeverity.ERROR if wrong else dg.AssetCheckSeverity.WARN,
        description="; ".join(summaries) or "there was no run to rehearse",
        metadata={"identical": len(right), "wrong": len(wrong), **table("rehearsals", rows)},
    )


_ABOUT = "In a sandbox, steps after the newest checkpoint with a successor repeat the recorded losses, bit for bit."


@dg.asset_check(asset=MODEL, name=CHECK, description=_ABOUT)
def rehearsal_identical(job: JobResource) -> dg.AssetCheckResult:
    """Rehearse the run. Production is only read. It costs a launch: `rehearse_job` does it for all runs, once a day."""
    return judge_rehearsals([rehearsed(job.lakehouse(), job.job_spec().run)])


def build_run_rehearsal(job: Job, run: str) -> dg.AssetChecksDefinition:
    """Return the check `rehearsal_identical` of the asset `models/<run>`."""
    model = model_key(run)

    def rehearse() -> dg.AssetCheckResult:
        return judge_rehearsals([rehearsed(job.lakehouse(), run)], model)

    return dg.asset_check(asset=model, name=CHECK, description=_ABOUT)(rehearse)
