"""Verification of a run's newest checkpoint. The result goes into the ledger and onto a page."""

from collections.abc import Mapping
from secrets import token_hex
from typing import Any

from dlac_pipeline.checkpoint.listing import Verification, list_checkpoints, verify_checkpoints
from dlac_pipeline.dagster.metadata import sql_metadata
from dlac_pipeline.lakehouse.errors import NoRestorableCheckpoint, NoSuchCheckpoint
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import record_verified
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.store_files import StoreFiles


def verify_head(lakehouse: Lakehouse, run: str, files: StoreFiles | None) -> Verification | None:
    """Read the files of the run's head again, and record the result. None: the run has no checkpoint yet.

    Raises:
        NoSuchRun: the run does not exist.
        NoSuchCheckpoint: its head was retired while it was read.
        NoRestorableCheckpoint: every checkpoint is damaged.
        StoreUnavailable: the store does not answer. That is no damage, and nothing is recorded.
    """
    listed = list_checkpoints(lakehouse, run)
    if not listed:
        return None
    heads = [each for each in listed if each.state == "head"]
    if not heads:
        raise NoRestorableCheckpoint(
            f"expected a checkpoint of run {run!r} that can be restored, found {len(listed)}, all damaged or abandoned: "
            "start a run under another name, or rewind it to one that is left"
        )
    found = verify_checkpoints(lakehouse, run, heads[0].step, files=files)
    verdict = next((each for each in found if each.checkpoint.state == "head"), None)
    if verdict is None:
        raise NoSuchCheckpoint(f"expected the head of run {run!r} to read it again, found it retired since")
    record_verified(
        Ledger(lakehouse), run, {verdict.checkpoint.checkpoint_id: verdict.problem}, verification=token_hex(8)
    )
    return verdict


def shown_verdict(verdict: Verification, *, took_s: float) -> Mapping[str, Any]:
    """A verdict as metadata."""
    checkpoint = verdict.checkpoint
    return {
        "run": checkpoint.run,
        "checkpoint_id": checkpoint.checkpoint_id,
        "step": checkpoint.step,
        "bytes": checkpoint.bytes or 0,
        "took_s": round(took_s, 3),
        "sql": sql_metadata(f"FROM verifications WHERE run = '{checkpoint.run}' ORDER BY verified_at"),
    }
