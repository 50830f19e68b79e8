"""Restore the newest whole checkpoint of a claimed run, and quarantine the damaged ones that are newer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dlac_pipeline.checkpoint.manifest import Manifest, mark_committed
from dlac_pipeline.checkpoint.restore.verified_copy import Restored, Verify, restore
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.commits import Attempt, quarantine
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import commit_marked
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of, restorable_rows, way_out
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, LedgerRow
from dlac_pipeline.supervise.start.claim import Claimed

Verifying = Callable[[int, int, int], None]
"""Callback for progress: the checkpoint's step, its verified bytes so far, and all its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestWhole:
    """The newest whole checkpoint of a claimed run."""

    rows: list[LedgerRow]
    """The rows of the run."""
    restored: Restored | None
    """None: the run has no checkpoint."""
    quarantined: list[str]
    """Newer checkpoints, which are damaged."""

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the checkpoint."""
        return None if self.restored is None else self.restored.manifest

    @property
    def head(self) -> str | None:
        """Id of the checkpoint."""
        return None if self.manifest is None else self.manifest.checkpoint_id


def restore_newest(
    ledger: Ledger, claimed: Claimed, tiers: Tiers, *, verifying: Verifying, verify: Verify
) -> NewestWhole:
    """Verify checkpoints of the lineage, the newest first, until one is whole. It becomes the head.

    `verifying` and `verify` are as for `start_attempt`. Raise `NoRestorableCheckpoint` if every one is damaged.
    """
    rows = ledger.rows(claimed.attempt.run, kinds=HEAD_KINDS)
    restored, damaged = _newest_whole(rows, claimed.head, tiers, verifying, verify)
    manifest = None if restored is None else restored.manifest
    if manifest is not None:
        _mark_head(manifest, checkpoint_rows(rows), tiers)
    if damaged:
        rows = _quarantine(ledger, claimed.attempt, damaged, manifest)
    return NewestWhole(rows=rows, restored=restored, quarantined=list(damaged))


def _quarantine(ledger: Ledger, attempt: Attempt, damaged: dict[str, str], head: Manifest | None) -> list[LedgerRow]:
    """Quarantine the damaged checkpoints that are newer than `head`, and return the rows of the run after that."""
    quarantine(ledger, attempt, damaged=damaged, head_after=None if head is None else head.checkpoint_id)
    rows = ledger.rows(attempt.run, kinds=HEAD_KINDS)
    if head is None:
        raise errors.NoRestorableCheckpoint(
            f"none of the checkpoints on the lineage of run {attempt.run!r} can be restored; damaged: {damaged!r}; "
            f"{way_out(attempt.run, rows)}"
        )
    return rows


def _mark_head(head: Manifest, known: Mapping[str, CheckpointRow], tiers: Tiers) -> None:
    """Renew the run's commit mark if the attempt that committed the head was killed before it wrote the mark."""
    files, folder = tiers.files.hurried(), tiers.durable_run()
    try:
        mark = commit_marked(folder, head.ledger_uuid, files)
    except errors.StoreUnavailable:  # the copy on this node is whole
        return
    newest = known.get("" if mark is None else mark.checkpoint_id)
    if newest is None or newest.seq < known[head.checkpoint_id].seq:
        mark_committed(head, folder, files)


def _newest_whole(
    rows: list[LedgerRow], head: str | None, tiers: Tiers, verifying: Verifying, verify: Verify
) -> tuple[Restored | None, dict[str, str]]:
    """Return the newest whole checkpoint of the head's lineage, and the newer ones that are damaged (id -> reason)."""
    restorable = restorable_rows(rows)
    damaged: dict[str, str] = {}
    for name in lineage_of(rows, head):
        if name in restorable:
            try:
                row = restorable[name]
                return restore(row, tiers, partial(verifying, row.step), verify=verify), damaged
            except errors.CheckpointDamaged as err:
                damaged[name] = str(err)
    return None, damaged
