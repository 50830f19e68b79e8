"""Asset checks on the model: the consumption audit, the digests of the newest checkpoint, and a rehearsal of a resume."""

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster.failures import as_failure
from dlac_pipeline.dagster.metadata import sql_metadata
from dlac_pipeline.dagster.training_runs import TrainingRunDefinition, model_key
from dlac_pipeline.lakehouse import errors

if TYPE_CHECKING:
    from dlac_pipeline.extensions.kept_checkpoints.listing import Verification
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.lakehouse.store_files import StoreFiles

_AUDITED = {
    "no_duplicate_rows": (
        "No row was consumed twice in a pass on the surviving lineage.",
        "FROM duplicates WHERE run = '{run}'",
    ),
    "no_missing_rows": (
        "Every live row before a cursor of the surviving lineage is recorded as consumed or left out.",
        "FROM gaps WHERE run = '{run}'",
    ),
    "consumption_exact": (
        "The ledger, the plan and the data files agree on every row.",
        "SELECT problem FROM problems WHERE run = '{run}'",
    ),
}
"""Check -> its description, and the rows that fail it, for `dlac sql`."""
_RESTORABLE = "checkpoint_restorable"
_RESTORABLE_ABOUT = "The files of the newest checkpoint exist, and have the committed digests when they are read again."
_REHEARSAL = "rehearsal_identical"
_REHEARSAL_ABOUT = "In a sandbox, steps after the newest checkpoint with a successor repeat their losses, bit for bit."
_REHEARSED = ("checkpoint_id", "step", "successor", "attempt", "world_size", "compared", "restore_s", "replay_s")
_IMPOSSIBLE = (
    errors.NothingToRehearse,
    errors.NoSuchRun,
    errors.NoSuchJobSpec,
    errors.CatalogUnreachable,
    errors.StoreUnavailable,
)
"""Errors of a run that cannot be rehearsed. They prove nothing about its checkpoints."""


def build_checks(run: TrainingRunDefinition, *, with_rehearsal: bool) -> list[dg.AssetChecksDefinition]:
    """Return the checks of the asset `models/<run>`."""
    model = model_key(run.name)

    def audit_run(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        yield from _audit(context, run)

    def verify_run(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return _verify(context, run)

    def rehearse_run() -> dg.AssetCheckResult:
        return rehearse_model(run.lakehouse(), run.name)

    specs = [dg.AssetCheckSpec(name, asset=model, description=text) for name, (text, _) in _AUDITED.items()]
    checks = [
        dg.multi_asset_check(name=f"{model.to_python_identifier()}_audit", specs=specs)(audit_run),
        dg.asset_check(asset=model, name=_RESTORABLE, description=_RESTORABLE_ABOUT)(verify_run),
        dg.asset_check(asset=model, name=_REHEARSAL, description=_REHEARSAL_ABOUT)(rehearse_run),
    ]
    return checks if with_rehearsal else checks[:-1]


def _audit(context: dg.AssetCheckExecutionContext, run: TrainingRunDefinition) -> Iterator[dg.AssetCheckResult]:
    from dlac_pipeline.audit.audit import audit_run

    with as_failure(context):
        report = audit_run(run.lakehouse(), run.name)
    shown = {name: value for name, value in report.to_json().items() if isinstance(value, (int, str, bool))}
    problems = "; ".join(report.problems) or "none"
    answers = {
        "no_duplicate_rows": (report.rows_duplicated == 0, f"{report.rows_duplicated} rows were consumed again"),
        "no_missing_rows": (report.rows_missing == 0, f"{report.rows_missing} rows are missing"),
        "consumption_exact": (report.exact, f"{len(report.problems)} contradictions"),
    }
    for name, (holds, found) in answers.items():
        yield dg.AssetCheckResult(
            passed=holds,
            check_name=name,
            asset_key=model_key(run.name),
            severity=dg.AssetCheckSeverity.ERROR,
            description=f"{found} among {report.rows_consumed} consumed in {report.passes_entered} passes",
            metadata={**shown, "problems": problems, "sql": sql_metadata(_AUDITED[name][1].format(run=run.name))},
        )


def _verify(context: dg.AssetCheckExecutionContext, run: TrainingRunDefinition) -> dg.AssetCheckResult:
    """Verify the newest checkpoint, if there is one. A store that is away, or a checkpoint that was retired, is a warning."""
    from dlac_pipeline.checkpoint.store import tiers_of

    began = time.monotonic()
    with as_failure(context):
        try:
            verdict = verify_head(run.lakehouse(), run.name, tiers_of(run.trained_spec()).files)
        except (errors.StoreUnavailable, errors.NoSuchCheckpoint) as err:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=str(err))
        except errors.NoRestorableCheckpoint as err:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.ERROR, description=str(err))
    if verdict is None:
        return dg.AssetCheckResult(passed=True, description=f"run {run.name!r} has no checkpoint yet: nothing to read")
    sql = f"FROM verifications WHERE run = '{run.name}' ORDER BY verified_at"
    return dg.AssetCheckResult(
        passed=verdict.problem is None,
        severity=dg.AssetCheckSeverity.ERROR,
        description=verdict.problem or f"every digest of {verdict.checkpoint.checkpoint_id} holds",
        metadata={**facts_of(verdict, began), "sql": sql_metadata(sql)},
    )


def verify_head(
    lakehouse: "Lakehouse", run: str, files: "StoreFiles | None", *, not_since: datetime | None = None
) -> "Verification | None":
    """Read the files of the run's head again, and record the result.

    None: the run has no checkpoint yet, or the digests of its head have held since `not_since`. Raise `NoSuchRun`,
    `NoSuchCheckpoint` if its head was retired while it was read, `NoRestorableCheckpoint` if every checkpoint is damaged, or
    `StoreUnavailable` if the store does not answer. That is no damage, and nothing is recorded.
    """
    from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, record_verified, verify_checkpoints
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    listed = list_checkpoints(lakehouse, run)
    head = next((each for each in listed if each.state == "head"), None)
    if head is None and listed:
        raise errors.NoRestorableCheckpoint(
            f"expected a checkpoint of run {run!r} that can be restored, found {len(listed)}, all damaged or abandoned: "
            "start a run under another name, or rewind it to one that is left"
        )
    if head is None or (not_since and head.verified_at and head.verified_at >= not_since):
        return None
    found = verify_checkpoints(lakehouse, run, head.step, files=files)
    verdict = next((each for each in found if each.checkpoint.state == "head"), None)
    if verdict is None:
        raise errors.NoSuchCheckpoint(f"expected the head of run {run!r} to read it again, found it retired since")
    found_now = {verdict.checkpoint.checkpoint_id: verdict.problem}
    record_verified(Ledger(lakehouse), run, found_now, verification=token_hex(8))
    return verdict


def facts_of(verdict: "Verification", began: float) -> dict[str, Any]:
    """Return a verdict as metadata. `began` is the monotonic time of the beginning."""
    names = ("run", "step", "checkpoint_id", "bytes")
    facts = {name: getattr(verdict.checkpoint, name) or 0 for name in names}
    return {**facts, "took_s": round(time.monotonic() - began, 3)}


def rehearse_model(
    lakehouse: "Lakehouse", run: str, *, steps: int | None = None, sandbox_folder: Path | None = None
) -> dg.AssetCheckResult:
    """Rehearse a run as it was trained. It passes if each loss is bit-identical. If it is impossible, that is a warning."""
    from dlac_pipeline.extensions.replay.rehearse import rehearse_run

    try:
        done = rehearse_run(lakehouse, run, steps=steps, sandbox_folder=sandbox_folder)
    except _IMPOSSIBLE as err:
        return _rehearsal_result(run, str(err), severity=dg.AssetCheckSeverity.WARN)
    except errors.DlacError as err:
        return _rehearsal_result(run, f"{errors.error_kind(err)}: {err}")
    facts = {name: getattr(done, name) for name in _REHEARSED}
    return _rehearsal_result(run, done.summary(), passed=done.identical, metadata=facts)


def _rehearsal_result(run: str, description: str, *, passed: bool = False, **more: Any) -> dg.AssetCheckResult:
    key = model_key(run)
    return dg.AssetCheckResult(asset_key=key, check_name=_REHEARSAL, description=description, passed=passed, **more)
