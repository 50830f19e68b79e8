"""The consumption audit, and a look whether the newest checkpoint can be restored, as asset checks on the model."""

import time
from collections.abc import Iterator, Mapping
from secrets import token_hex
from typing import Any

import dagster as dg

from assets.pages import sql
from assets.resources import JobResource
from assets.training import model_checkpoint
from catalog.commits import record_verified
from catalog.connect import Lakehouse
from catalog.errors import NoRestorableCheckpoint, NoSuchRun, StoreUnavailable
from catalog.ledger import Ledger
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.files import StoreFiles
from dlac_pipeline.checkpoint.listing import Verdict, list_checkpoints, verify_checkpoints
from dlac_pipeline.checkpoint.store import tiers_of

_ROWS_OF = {
    "no_duplicate_rows": "FROM duplicates WHERE run = '{run}'",
    "no_missing_rows": "FROM gaps WHERE run = '{run}'",
    "consumption_exact": "SELECT problem FROM lineage_problems WHERE run = '{run}'\n"
    "UNION ALL SELECT problem FROM leg_problems WHERE run = '{run}'\n"
    "UNION ALL SELECT problem FROM cut_problems WHERE run = '{run}'\n"
    "UNION ALL SELECT problem FROM advance_problems WHERE run = '{run}'",
}
"""Check -> the rows that fail it, for `dlac sql`."""


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
def consumption_audit(job: JobResource) -> Iterator[dg.AssetCheckResult]:
    """Audit the run once, and answer all three; rows that are not exactly once in a model are an error of any size."""
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
            asset_key=model_checkpoint.key,
            severity=dg.AssetCheckSeverity.ERROR,
            description=f"{found} among {report.rows_consumed} consumed in {report.passes_entered} passes",
            metadata={**shown, "problems": problems, "sql": sql(_ROWS_OF[name].format(run=run))},
        )


@dg.asset_check(
    asset=model_checkpoint,
    name="checkpoint_restorable",
    description="The files of the newest checkpoint are there, and read again they have the digests that were committed.",
)
def checkpoint_restorable(job: JobResource) -> dg.AssetCheckResult:
    """Read the newest checkpoint again and write into the ledger what was found; a store that is away is only a warning.

    A run that has taken none yet, such as one that waits for a batch, has nothing that could not be restored.
    """
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


def verified_head(lakehouse: Lakehouse, run: str, files: StoreFiles | None) -> Verdict | None:
    """Read the files of the run's head again, and record what was found; None: the run has no checkpoint yet.

    Raises:
        NoSuchRun: there is no such run; or its head was retired while it was read.
        NoRestorableCheckpoint: every checkpoint is damaged.
        StoreUnavailable: the store does not answer; that is no damage, and nothing is recorded.
    """
    listed = list_checkpoints(lakehouse, run)
    if not listed:
        return None
    heads = [each for each in listed if each.state == "head"]
    if not heads:
        raise NoRestorableCheckpoint(
            f"expected a checkpoint of run {run!r} that can be restored, found {len(listed)}, all damaged or left behind: "
            "start a run under another name, or rewind it to one that is left"
        )
    found = verify_checkpoints(lakehouse, run, heads[0].step, files=files)
    verdict = next((each for each in found if each.checkpoint.state == "head"), None)
    if verdict is None:
        raise NoSuchRun(f"expected the head of run {run!r} to read it again, found that it was retired meanwhile")
    record_verified(
        Ledger(lakehouse), run, {verdict.checkpoint.checkpoint_id: verdict.problem}, verification=token_hex(8)
    )
    return verdict


def shown_verdict(verdict: Verdict, *, took_s: float) -> Mapping[str, Any]:
    """A verdict as metadata."""
    checkpoint = verdict.checkpoint
    return {
        "run": checkpoint.run,
        "checkpoint_id": checkpoint.checkpoint_id,
        "step": checkpoint.step,
        "bytes": checkpoint.bytes or 0,
        "took_s": round(took_s, 3),
        "sql": sql(f"FROM verifications WHERE run = '{checkpoint.run}' ORDER BY verified_at"),
    }
