"""Files that were exported from a checkpoint, by their digests in the ledger. This module needs no PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import beside
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.lakehouse.store_files import file_digest


def record_exports(ledger: Ledger, run: str, exports: Sequence[ExportRow]) -> None:
    """Record files that were made from a checkpoint. Each once, however often it is made."""

    def decide(state: RunState) -> Append | None:
        known = {row.digest for row in ledger.rows_at(state, kinds=(ExportRow,))}
        new = [row for row in exports if row.digest not in known]
        return beside(state, new) if new else None

    ledger.append(run, decide)


def checkpoint_of_file(lakehouse: Lakehouse, path: Path) -> dict[str, Any]:
    """Return the checkpoint from which a file of weights was exported, by its digest. Raise `NoSuchCheckpoint` without one."""
    digest = file_digest(path)
    row = Ledger(lakehouse).export(digest)
    if row is None:
        raise NoSuchCheckpoint(
            f"expected {str(path)!r} to be an export that this lakehouse knows, found none with its digest {digest}"
        )
    checkpoint = checkpoint_rows(Ledger(lakehouse).head_rows(row.run))[row.checkpoint_id]
    return {
        "digest": digest,
        "run": row.run,
        "checkpoint_id": row.checkpoint_id,
        "step": checkpoint.step,
        "model_digest": checkpoint.model_digest,
        "exported_at": row.committed_at,
    }
