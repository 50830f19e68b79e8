"""The checkpoint of a file of weights. It needs no PyTorch."""

from pathlib import Path
from typing import Any

from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger import run_rows
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.store_files import file_digest


def checkpoint_of_file(lakehouse: Lakehouse, path: Path) -> dict[str, Any]:
    """Return the checkpoint from which a file of weights was exported, by its digest. Raise `NoSuchCheckpoint` without one."""
    digest = file_digest(path)
    row = Ledger(lakehouse).export(digest)
    if row is None:
        raise NoSuchCheckpoint(
            f"expected {str(path)!r} to be an export that this lakehouse knows, found none with its digest {digest}"
        )
    checkpoint = run_rows.checkpoint_rows(Ledger(lakehouse).head_rows(row.run))[row.checkpoint_id]
    return {
        "digest": digest,
        "run": row.run,
        "checkpoint_id": row.checkpoint_id,
        "step": checkpoint.step,
        "model_digest": checkpoint.model_digest,
        "exported_at": row.committed_at,
    }
