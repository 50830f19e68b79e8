"""A run that begins from a checkpoint that others wrote: its first checkpoint, at step 0, whose history is unknown."""

from __future__ import annotations

import warnings
from pathlib import Path

from catalog.connect import Lakehouse
from catalog.errors import SpecInvalid
from catalog.ledger import Ledger
from catalog.run_rows import checkpoint_rows
from dlac_pipeline.checkpoint.foreign import Foreign
from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.sealing import Sealer
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.checkpoint.writing import Direct
from dlac_pipeline.recover.beginning import Beginning, begin
from dlac_pipeline.recover.run_lock import run_lock
from dlac_pipeline.spec import JobSpec


def adopt(lakehouse: Lakehouse, spec: JobSpec, foreign: Foreign) -> str:
    """Make the foreign checkpoint the first one of the spec's run, which is new; gives its id.

    Raises:
        SpecInvalid: the run has checkpoints of its own.
        StoreUnavailable: it cannot be written to the store; nothing was committed, and adopting it again goes on.
    """
    ledger, tiers = Ledger(lakehouse), tiers_of(spec)
    _check_new(ledger, spec.run)
    tiers.check_writable()
    with run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False):
        _check_new(ledger, spec.run)
        beginning = Beginning(
            engine=foreign.engine,
            world_size=foreign.world_size,
            make=lambda name, folder: _copied(foreign, tiers, name, folder),
            instead={"adopts": str(foreign.origin)},
            note={"adopted": str(foreign.origin)},
        )
        return begin(lakehouse, spec, beginning)


def _check_new(ledger: Ledger, run: str) -> None:
    """Check that the run has no checkpoint yet.

    Raises:
        SpecInvalid: it has.
    """
    taken = checkpoint_rows(ledger.rows(run, kinds=("checkpoint",)))
    if taken:
        raise SpecInvalid(
            f"expected a run without checkpoints to adopt one, found {len(taken)} of run {run!r}: choose another name"
        )


def _copied(foreign: Foreign, tiers: Tiers, name: str, folder: Path) -> list[FileEntry]:
    sealer = Sealer(tiers, name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            foreign.copy(folder, Direct(sealer.save).write)
            return sealer.finish()
    finally:
        sealer.close()
