"""Checkpoints of a run as an operator sees them, and the comparison of their files with the committed digests."""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from dlac_pipeline.checkpoint.manifest import read_manifest, verify_files
from dlac_pipeline.checkpoint.store import MANIFEST, folder_name_of, folder_uri
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, NoSuchCheckpoint, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger import commits, run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.store_files import StoreFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedCheckpoint:
    """A checkpoint."""

    run: str
    checkpoint_id: str
    step: int
    attempt: int
    committed_at: datetime
    bytes: int | None
    """None for checkpoints of versions that did not write it down."""
    state: str
    """State: head, kept, left (not an ancestor of the head), retired, damaged (quarantined)."""
    verified_at: datetime | None
    """Last moment at which all its digests were verified, by `dlac checkpoint verify` or for a resume, or None."""
    names: list[str]
    """Names given by `dlac checkpoint tag`. It is kept while it has one."""
    tiers: list[str]
    """Places of its files: store, or local (a copy on this node)."""
    folder: str
    """Address in the store."""
    manifest_uri: str
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of re-reading a checkpoint. No problem: every digest matches."""

    checkpoint: ListedCheckpoint
    problem: str | None


def list_checkpoints(lakehouse: Lakehouse, run: str) -> list[ListedCheckpoint]:
    """Return all checkpoints of a run, oldest first. Raise `NoSuchRun` if the ledger has no row of it."""
    rows = Ledger(lakehouse).head_rows(run)
    head = run_rows.fence_of_rows(rows).head  # from these rows, because the run may commit more
    checkpoints = run_rows.checkpoint_rows(rows)
    states = dict.fromkeys(checkpoints, "left") | dict.fromkeys(run_rows.lineage_of(rows, head), "kept")
    states |= {row.checkpoint_id: "head" for row in checkpoints.values() if row.checkpoint_id == head}
    states |= {row.checkpoint_id: "retired" for row in rows if isinstance(row, typed_rows.RetireRow)}
    states |= {row.checkpoint_id: "damaged" for row in rows if isinstance(row, typed_rows.QuarantinedCheckpointRow)}
    claims = {row.attempt: row for row in rows if isinstance(row, typed_rows.ClaimRow)}
    verified = _verified(rows)
    names = commits.names_of(rows)
    return [
        ListedCheckpoint(
            run=row.run,
            checkpoint_id=each,
            step=row.step,
            attempt=row.attempt,
            committed_at=row.committed_at,
            bytes=row.bytes,
            state=states[each],
            verified_at=verified.get(each),
            names=[name for name, checkpoint_id in names.items() if checkpoint_id == each],
            tiers=[] if states[each] == "retired" else _tiers_of(row, claims[row.attempt]),
            folder=folder_uri(row.manifest_uri),
            manifest_uri=row.manifest_uri,
            manifest_digest=row.manifest_digest,
        )
        for each, row in checkpoints.items()
    ]


def verify_checkpoints(
    lakehouse: Lakehouse,
    run: str,
    step: int | None = None,
    *,
    files: StoreFiles | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Verification]:
    """Re-read what can still be restored from the store, the newest first, or only the checkpoint of one step.

    `progress` receives the number of finished checkpoints and their total. Raise `NoSuchRun`, `NoSuchCheckpoint` if the run keeps
    none of that step, or `StoreUnavailable`: the current checkpoint and those after it were not verified.
    """
    listed = [each for each in list_checkpoints(lakehouse, run) if each.state in ("head", "kept", "left")]
    chosen = [each for each in reversed(listed) if step in (None, each.step)]
    if not chosen:
        steps = [each.step for each in listed]
        raise NoSuchCheckpoint(
            f"expected a checkpoint of run {run!r}{'' if step is None else f' at step {step}'}, found {steps!r}"
        )
    for done, each in enumerate(chosen):
        progress(done, len(chosen))
        problem = None
        store = files or StoreFiles(lakehouse.config.properties)
        try:
            verify_files(read_manifest(each.manifest_uri, each.manifest_digest, store), each.folder, store)
        except CheckpointDamaged as err:
            problem = str(err)
        except StoreUnavailable:  # or the folder of its attempt has gone with it
            if _retired_meanwhile(lakehouse, each):
                continue
            raise
        if problem is None or not _retired_meanwhile(lakehouse, each):
            yield Verification(each, problem)


def record_verified(ledger: Ledger, run: str, problems: Mapping[str, str | None], *, verification: str) -> None:
    """Record comparisons of digests: id of a checkpoint -> problem, None for a whole one.

    `verification` is the caller's own id of it: after a lost answer it is not recorded twice.
    """

    def decide(state: RunState) -> Append | None:
        if any(row.verification == verification for row in ledger.rows_at(state, kinds=(typed_rows.VerifyRow,))):
            return None
        row = partial(typed_rows.VerifyRow, verification=verification)
        return commits.beside(state, [row(checkpoint_id=each, problem=problem) for each, problem in problems.items()])

    ledger.append(run, decide)


def _retired_meanwhile(lakehouse: Lakehouse, checkpoint: ListedCheckpoint) -> bool:
    listed = list_checkpoints(lakehouse, checkpoint.run)
    return any(one.checkpoint_id == checkpoint.checkpoint_id and one.state == "retired" for one in listed)


def _verified(rows: list[typed_rows.LedgerRow]) -> dict[str, datetime]:
    """Return id -> last verification. An attempt that resumed from a checkpoint had verified it after its claim."""
    found: dict[str, datetime] = {}
    claimed: dict[int, datetime] = {}
    for row in rows:  # in order of seq
        if isinstance(row, typed_rows.ClaimRow):
            claimed[row.attempt] = row.committed_at
        elif isinstance(row, typed_rows.CheckpointRow):
            since, parent = claimed.pop(row.attempt, None), row.parent  # the first one after the claim
            if since is not None and parent is not None:
                found[parent] = max(since, found.get(parent, since))
        elif isinstance(row, typed_rows.VerifyRow) and row.problem is None:
            found[row.checkpoint_id] = row.committed_at
    return found


def _tiers_of(row: typed_rows.CheckpointRow, claim: typed_rows.ClaimRow) -> list[str]:
    """Return the places of a checkpoint's files. The copy that was made before the store's may still be here."""
    copy = Path(claim.local) / row.run / folder_name_of(row.manifest_uri) / MANIFEST
    is_here = claim.local and claim.host == socket.gethostname() and copy.is_file()
    return ["local", "store"] if is_here and copy.resolve().as_uri() != row.manifest_uri else ["store"]
