"""Fork and adoption: a new run that begins from a checkpoint of another run, or of another program.

Its first checkpoint, at step 0, has that state. A fork inherits what its parent has consumed. The history of a foreign
checkpoint is unknown. The data order starts from the beginning, as the job spec states.
"""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.engines.engine import Foreign
from dlac_pipeline.checkpoint.manifest import FileEntry, Manifest, check_inside, read_manifest, verify_file
from dlac_pipeline.checkpoint.store import Tiers, folder_uri, tiers_of
from dlac_pipeline.extensions.exchange.foreign import checkpoint_of_header, copy_foreign
from dlac_pipeline.extensions.exchange.initial_checkpoint import Beginning, begin, check_new
from dlac_pipeline.lakehouse import durable_io, errors, store_files
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import names_of, new_nonce
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, ExportRow, ForkRow, NameRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.ranks.run_events import RUN_BEGUN, report_command

_THREADS = 4
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a hard link for which the file is copied instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forked:
    """A forked run and its origin."""

    run: str
    checkpoint_id: str
    """First checkpoint of the run."""
    parent_run: str
    parent_checkpoint: str
    parent_step: int


def fork_run(
    lakehouse: Lakehouse,
    spec: JobSpec,
    parent_run: str,
    *,
    step: int | None = None,
    checkpoint_id: str | None = None,
    files: store_files.StoreFiles | None = None,
) -> Forked:
    """Begin the spec's run, which must be new, from a restorable checkpoint of `parent_run`.

    The checkpoint is chosen by a step, by an id, or it is the head. `files` reaches the parent's store if the spec's own
    properties do not.

    Raises:
        NoSuchRun: the parent does not exist.
        NoSuchCheckpoint: the parent keeps no such checkpoint.
        SpecInvalid: the spec's run exists already.
        LedgerOlderThanStore: the catalog was restored from an older backup.
        CheckpointDamaged: the parent's files differ from those committed. Nothing was begun.
        StoreUnavailable: a store is unavailable or full. Nothing was committed, and the call can be repeated.
    """
    ledger, tiers = Ledger(lakehouse), tiers_of(spec)
    check_ledger(lakehouse, parent_run)
    rows = ledger.head_rows(parent_run)
    if step == 0 and all(row.step > 0 for row in checkpoint_rows(rows).values()):
        raise errors.NoSuchCheckpoint(
            f"expected a checkpoint of run {parent_run!r} to begin with, found step 0, at which it had none: start run "
            f"{spec.run!r} with `dlac train` instead"
        )
    target = ledger.restorable(parent_run, step, checkpoint_id=checkpoint_id)
    _check_new(ledger, spec.run, parent_run)
    tiers.check_writable()
    with (
        run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False),
        dlac.keep_checkpoint(
            ledger, parent_run, f"{_holds_of(spec.run)}:{new_nonce()}", checkpoint_id=target.checkpoint_id
        ),
    ):
        _check_new(ledger, spec.run, parent_run)
        begun = begin(lakehouse, spec, _make_beginning(parent_run, target, files or tiers.files, tiers))
        _release_parent(ledger, spec.run, parent_run)
    report_command(spec, {"event": RUN_BEGUN})
    return Forked(
        run=spec.run,
        checkpoint_id=begun,
        parent_run=parent_run,
        parent_checkpoint=target.checkpoint_id,
        parent_step=target.step,
    )


def _make_beginning(parent_run: str, target: CheckpointRow, files: store_files.StoreFiles, tiers: Tiers) -> Beginning:
    """Return the beginning of a run from the parent's checkpoint `target`. `files` reaches the parent's store."""
    manifest = read_manifest(target.manifest_uri, target.manifest_digest, files)
    row = ForkRow(parent_run=parent_run, parent_checkpoint=target.checkpoint_id, parent_step=target.step)
    return Beginning(
        engine=manifest.engine,
        world_size=manifest.world_size,
        make=lambda name, folder: _copied(manifest, folder_uri(target.manifest_uri), files, tiers, name, folder),
        purpose={"purpose": "forks", "origin": target.checkpoint_id},
        note={},
        rows=[row],
    )


def _holds_of(run: str) -> str:
    """Return the prefix of the names that keep a parent's checkpoint while `run` is forked from it. A nonce follows."""
    return f"fork:{run}"


def _release_parent(ledger: Ledger, run: str, parent_run: str) -> None:
    """Remove every name that keeps a parent's checkpoint for `run`, which exists now, also names of killed or late forks."""
    for name in names_of(ledger.rows(parent_run, kinds=(NameRow,))):
        if name.rpartition(":")[0] == _holds_of(run):
            with suppress(errors.NoSuchCheckpoint):  # its owner removed it
                dlac.unname_checkpoint(ledger, parent_run, name)


def _check_new(ledger: Ledger, run: str, parent_run: str) -> None:
    """Check that the run is new, or was only begun by forks that did not finish. Raises as `check_new`."""
    rows = ledger.rows(run, kinds=HEAD_KINDS)
    try:
        check_new(rows, run, purpose="forks")
    except errors.SpecInvalid:
        if any(isinstance(row, ForkRow) for row in rows):  # the fork may have been killed right after its commit
            _release_parent(ledger, run, parent_run)
        raise


def _copied(
    manifest: Manifest, source: str, files: store_files.StoreFiles, tiers: Tiers, name: str, folder: Path
) -> list[FileEntry]:
    """Copy the parent's files into the new checkpoint's folder and into its copy in the store, and verify each digest."""

    def take(entry: FileEntry) -> FileEntry:
        path = folder / entry.path
        store_files.make_below(folder, path.parent)
        place = entry.folder_in(source)
        check_inside(entry, place)
        _take(store_files.below(place, entry.path), path, files)
        verify_file(entry, str(path), store_files.StoreFiles(deadline_s=0.0))
        if tiers.store is None:
            durable_io.fsync_path(path)
        else:
            tiers.put(path, name, entry.path)
        return replace(entry, folder=entry.folder and name)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fork") as pool:
        entries = list(pool.map(take, manifest.files))
    for each in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        durable_io.fsync_path(each)
    return entries


def _take(address: str, path: Path, files: store_files.StoreFiles) -> None:
    """Place a file of the parent at `path`, as a hard link if possible. Neither run writes to the file again."""
    try:
        if store_files.is_local(address):
            try:
                os.link(store_files.path_at(address), path)
            except OSError as err:
                if err.errno not in _NO_LINK:
                    raise
            else:
                return
        files.fetch(address, path)
    except FileNotFoundError as err:
        raise errors.CheckpointDamaged(f"expected the file {address!r} of a committed checkpoint, found none") from err


def adopt_checkpoint(lakehouse: Lakehouse, spec: JobSpec, foreign: Foreign) -> str:
    """Make the foreign checkpoint the first one of the spec's run, which must be new. Return its id.

    An export of this lakehouse is a fork of its checkpoint.

    Raises:
        SpecInvalid: the run exists already, or the files are exports of several checkpoints.
        StoreUnavailable: the checkpoint cannot be written to the store. Nothing was committed, and the call can be repeated.
    """
    ledger, tiers = Ledger(lakehouse), tiers_of(spec)
    check_new(ledger.rows(spec.run, kinds=HEAD_KINDS), spec.run, purpose="adopts")
    parents = _parents_of(ledger, foreign)
    tiers.check_writable()
    with run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False):
        check_new(ledger.rows(spec.run, kinds=HEAD_KINDS), spec.run, purpose="adopts")
        beginning = Beginning(
            engine=foreign.engine,
            world_size=foreign.world_size,
            make=lambda name, folder: copy_foreign(foreign, tiers, name, folder),
            purpose={"purpose": "adopts", "origin": str(foreign.origin)},
            note={"adopted": str(foreign.origin)},
            rows=parents,
        )
        begun = begin(lakehouse, spec, beginning)
    report_command(spec, {"event": RUN_BEGUN})
    return begun


def _parents_of(ledger: Ledger, foreign: Foreign) -> list[ForkRow]:
    """Return the checkpoint from which foreign files were exported, by digests or headers. Empty: their origin is unknown."""
    digests = {store_files.file_digest(path) for path in foreign.files}
    named = {checkpoint_of_header(path) for path in foreign.files}
    columns = ("run", "seq", "kind", "checkpoint_id", "step", "export")
    rows = ledger.rows_of_runs((CheckpointRow, ExportRow), columns=columns) if foreign.files else {}
    known = [row for each in rows.values() for row in each]
    named |= {row.checkpoint_id for row in known if isinstance(row, ExportRow) and row.digest in digests}
    found = {row.checkpoint_id: row for row in known if isinstance(row, CheckpointRow) and row.checkpoint_id in named}
    if len(found) > 1:
        raise errors.SpecInvalid(
            f"expected the weights of one checkpoint in {str(foreign.origin)!r}, found exports of {sorted(found)!r}: adopt "
            "the files of one of them"
        )
    return [ForkRow(parent_run=row.run, parent_checkpoint=name, parent_step=row.step) for name, row in found.items()]
