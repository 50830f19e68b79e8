"""The consumption audit as asset checks on the model checkpoint."""

import dagster as dg

from assets.resources import JobResource
from assets.training import model_checkpoint
from dlac_pipeline.audit.audit import audit_run


@dg.multi_asset_check(
    specs=[
        dg.AssetCheckSpec(
            "no_duplicate_rows",
            asset=model_checkpoint,
            description="No row was consumed twice in a pass on the surviving lineage.",
        ),
        dg.AssetCheckSpec(
            "no_missing_rows",
            asset=model_checkpoint,
            description="No live row behind a cursor is unrecorded on the surviving lineage.",
        ),
        dg.AssetCheckSpec(
            "consumption_exact",
            asset=model_checkpoint,
            description="The ledger, the plan and the data files agree on every row.",
        ),
    ]
)
def consumption_audit(job: JobResource):  # type: ignore[no-untyped-def]  # dagster reads results from a generator
    """Audit the run once, and answer all three."""
    report = audit_run(job.lakehouse(), job.job_spec().run)
    shown = {name: value for name, value in report.to_json().items() if isinstance(value, (int, str, bool))}
    problems = "; ".join(report.problems) or "none"
    passed = {
        "no_duplicate_rows": report.rows_duplicated == 0,
        "no_missing_rows": report.rows_missing == 0,
        "consumption_exact": report.exact,
    }
    for name, holds in passed.items():
        yield dg.AssetCheckResult(
            passed=holds, check_name=name, asset_key=model_checkpoint.key, metadata={**shown, "problems": problems}
        )
