"""The consumption audit, and a look whether the newest checkpoint can be restored, as asset checks on the model."""

import time
from collections.abc import Iterator

import dagster as dg

from dlac_pipeline.dagster.metadata import sql_metadata
from dlac_pipeline.dagster.resources import JobResource
from dlac_pipeline.dagster.training_runs import MODEL
from dlac_pipeline.lakehouse.errors import NoRestorableCheckpoint, StoreUnavailable

_ROWS_OF = {
    "no_duplicate_rows": "FROM duplicates WHERE run = '{run}'",
    "no_missing_rows": "FROM gaps WHERE run = '{run}'",
    "consumption_exact": "SELECT problem FROM problems WHERE run = '{run}'",
}
"""Check -> the rows that fail it, for `dlac sql`."""


@dg.multi_asset_check(
    specs=[
        dg.AssetCheckSpec(
            "no_duplicate_rows",
            asset=MODEL,
            description="No row was consumed twice in a pass on the surviving lineage.",
        ),
        dg.AssetCheckSpec(
            "no_missing_rows",
            asset=MODEL,
            description="No live row behind a cursor is unrecorded on the surviving lineage.",
        ),
        dg.AssetCheckSpec(
            "consumption_exact",
            asset=MODEL,
            description="The ledger, the plan and the data files agree on every row.",
        ),
    ]
)
def consumption_audit(job: JobResource) -> Iterator[dg.AssetCheckResult]:
    """Audit the run once for all three checks. Rows that are not exactly once in a model are an error of any size."""
    from dlac_pipeline.audit.audit import audit_run

    run = job.job_spec().run
    report = audit_run(job.lakehouse(), run)
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
            asset_key=MODEL,
            severity=dg.AssetCheckSeverity.ERROR,
            description=f"{found} among {report.rows_consumed} consumed in {report.passes_entered} passes",
            metadata={**shown, "problems": problems, "sql": sql_metadata(_ROWS_OF[name].format(run=run))},
        )


@dg.asset_check(
    asset=MODEL,
    name="checkpoint_restorable",
    description="The files of the newest checkpoint are there, and read again they have the digests that were committed.",
)
def checkpoint_restorable(job: JobResource) -> dg.AssetCheckResult:
    """Read the newest checkpoint again and write the result into the ledger. An unavailable store is only a warning.

    A run without a checkpoint, such as one that waits for a batch, passes.
    """
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.dagster.assets.verified import shown_verdict, verified_head

    spec, lakehouse = job.job_spec(), job.lakehouse()
    began = time.monotonic()
    try:
        verdict = verified_head(lakehouse, spec.run, tiers_of(spec).files)
    except StoreUnavailable as err:
        return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=str(err))
    except NoRestorableCheckpoint as err:
        return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.ERROR, description=str(err))
    if verdict is None:
        return dg.AssetCheckResult(passed=True, description=f"run {spec.run!r} has no checkpoint yet: nothing to read")
    return dg.AssetCheckResult(
        passed=verdict.problem is None,
        severity=dg.AssetCheckSeverity.ERROR,
        description=verdict.problem or f"every digest of {verdict.checkpoint.checkpoint_id} holds",
        metadata=shown_verdict(verdict, took_s=time.monotonic() - began),
    )
