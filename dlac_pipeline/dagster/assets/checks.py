"""The consumption audit, and a look whether the newest checkpoint can be restored, as asset checks on the model."""

import time
from collections.abc import Iterator

import dagster as dg

from dlac_pipeline.dagster.failures import as_failure
from dlac_pipeline.dagster.metadata import sql_metadata
from dlac_pipeline.dagster.training_runs import TrainingRunDefinition, model_key
from dlac_pipeline.lakehouse.errors import NoRestorableCheckpoint, NoSuchCheckpoint, StoreUnavailable

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


def build_checks(run: TrainingRunDefinition) -> list[dg.AssetChecksDefinition]:
    """Return the checks of the asset `models/<run>`."""
    model = model_key(run.name)

    def audit_run(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        yield from _audit(context, run)

    def verify_run(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return _verify(context, run)

    specs = [dg.AssetCheckSpec(name, asset=model, description=text) for name, (text, _) in _AUDITED.items()]
    return [
        dg.multi_asset_check(name=f"{model.to_python_identifier()}_audit", specs=specs)(audit_run),
        dg.asset_check(asset=model, name=_RESTORABLE, description=_RESTORABLE_ABOUT)(verify_run),
    ]


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
    """Verify the newest checkpoint.

    An unavailable store is only a warning, and so is a checkpoint that was retired while it was read. A run without a
    checkpoint, such as one that waits for a batch, passes.
    """
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.dagster.assets.head_verification import shown_verdict, verify_head

    began = time.monotonic()
    with as_failure(context):
        try:
            verdict = verify_head(run.lakehouse(), run.name, tiers_of(run.job_spec()).files)
        except (StoreUnavailable, NoSuchCheckpoint) as err:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=str(err))
        except NoRestorableCheckpoint as err:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.ERROR, description=str(err))
    if verdict is None:
        return dg.AssetCheckResult(passed=True, description=f"run {run.name!r} has no checkpoint yet: nothing to read")
    return dg.AssetCheckResult(
        passed=verdict.problem is None,
        severity=dg.AssetCheckSeverity.ERROR,
        description=verdict.problem or f"every digest of {verdict.checkpoint.checkpoint_id} holds",
        metadata=shown_verdict(verdict, took_s=time.monotonic() - began),
    )
