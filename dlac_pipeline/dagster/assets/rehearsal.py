"""Rehearsal as an asset check: in a sandbox, the steps after a checkpoint have the losses that production recorded."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster.training_runs import TrainingRunDefinition, model_key
from dlac_pipeline.lakehouse import errors

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

_CHECK = "rehearsal_identical"
_FACTS = ("checkpoint_id", "step", "successor", "attempt", "world_size", "compared", "restore_s", "replay_s")
_IMPOSSIBLE = (
    errors.NothingToRehearse,
    errors.NoSuchRun,
    errors.NoSuchJobSpec,
    errors.CatalogUnreachable,
    errors.StoreUnavailable,
)
"""Errors of a run that cannot be rehearsed. They prove nothing about its checkpoints."""


def build_rehearsal(run: TrainingRunDefinition) -> dg.AssetChecksDefinition:
    """Return the check `rehearsal_identical` of the asset `models/<run>`."""

    def rehearse_run() -> dg.AssetCheckResult:
        return rehearse_model(run.lakehouse(), run.name)

    return dg.asset_check(
        asset=model_key(run.name),
        name=_CHECK,
        description="In a sandbox, steps after the newest checkpoint with a successor repeat the recorded losses, bit for bit.",
    )(rehearse_run)


def rehearse_model(
    lakehouse: "Lakehouse", run: str, *, steps: int | None = None, sandbox_folder: Path | None = None
) -> dg.AssetCheckResult:
    """Rehearse a run as it was trained. It passes if each loss is bit-identical. If it is impossible, that is a warning."""
    from dlac_pipeline.operations.rehearse import rehearse_run

    try:
        done = rehearse_run(lakehouse, run, steps=steps, sandbox_folder=sandbox_folder)
    except _IMPOSSIBLE as err:
        return _result(run, str(err), severity=dg.AssetCheckSeverity.WARN)
    except errors.DlacError as err:
        return _result(run, f"{errors.error_kind(err)}: {err}")
    facts = {name: getattr(done, name) for name in _FACTS}
    return _result(run, done.summary(), passed=done.identical, metadata=facts)


def _result(run: str, description: str, *, passed: bool = False, **more: Any) -> dg.AssetCheckResult:
    key = model_key(run)
    return dg.AssetCheckResult(asset_key=key, check_name=_CHECK, description=description, passed=passed, **more)
