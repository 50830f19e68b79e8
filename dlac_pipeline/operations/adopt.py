"""Adoption: a run that begins from a foreign checkpoint. Its first checkpoint, at step 0, has an unknown history."""

import warnings
from pathlib import Path

from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.restore.foreign import Foreign
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.checkpoint.stage.durable_writer import DurableWriter
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.operations.initial_checkpoint import Beginning, begin, check_new
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.run_lock import run_lock


def adopt_checkpoint(lakehouse: Lakehouse, spec: JobSpec, foreign: Foreign) -> str:
    """Make the foreign checkpoint the first one of the spec's run, which must be new. Return its id.

    Raises:
        SpecInvalid: the run exists already.
        StoreUnavailable: the checkpoint cannot be written to the store. Nothing was committed, and the call can be repeated.
    """
    ledger, tiers = Ledger(lakehouse), tiers_of(spec)
    check_new(ledger.rows(spec.run, kinds=HEAD_KINDS), spec.run, purpose="adopts")
    tiers.check_writable()
    with run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False):
        check_new(ledger.rows(spec.run, kinds=HEAD_KINDS), spec.run, purpose="adopts")
        beginning = Beginning(
            engine=foreign.engine,
            world_size=foreign.world_size,
            make=lambda name, folder: _copied(foreign, tiers, name, folder),
            purpose={"purpose": "adopts", "origin": str(foreign.origin)},
            note={"adopted": str(foreign.origin)},
        )
        return begin(lakehouse, spec, beginning)


def _copied(foreign: Foreign, tiers: Tiers, name: str, folder: Path) -> list[FileEntry]:
    sealer = DurableWriter(tiers, name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            foreign.copy(folder, Direct(sealer.save).write)
            return sealer.finish()
    finally:
        sealer.close()
