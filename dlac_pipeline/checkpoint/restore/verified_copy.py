"""Verified local folder of a committed checkpoint: the local copy, repaired from the store."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dlac_pipeline.checkpoint import manifest as manifests
from dlac_pipeline.checkpoint.store import MANIFEST, Tiers, folder_name_of, folder_of, folder_uri, storing
from dlac_pipeline.lakehouse.durable_io import temporary_beside, write_durably
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles, below

Verify = Callable[[CheckpointRow, manifests.Manifest, StoreFiles, manifests.Done], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A checkpoint that can be loaded."""

    manifest: manifests.Manifest
    folder: Path
    fetched: list[str]
    """Files that came from the store, because the local copy lacked them or had them otherwise."""


def manifest_of(row: CheckpointRow, tiers: Tiers) -> manifests.Manifest:
    """Return the manifest that a ledger row names, from this node's copy if that is whole. Raises as `restore`."""
    uri = row.manifest_uri
    return manifests.read_manifest(uri, row.manifest_digest, tiers.files, copy=tiers.folder(folder_name_of(uri)))


def verify_here(row: CheckpointRow, manifest: manifests.Manifest, files: StoreFiles, done: manifests.Done) -> None:
    """Verify the checkpoint that a ledger row names where it was written. Raises as `verify_files`."""
    manifests.verify_files(manifest, folder_uri(row.manifest_uri), files, done)


def restore(
    row: CheckpointRow, tiers: Tiers, done: manifests.Done = lambda done, total: None, *, verify: Verify = verify_here
) -> Restored:
    """Return the verified folder of the checkpoint that a ledger row names. Safe to be killed and repeated.

    `done` receives the progress. `verify` verifies it where no copy has to be made. Raise `CheckpointDamaged` if a file is lost
    or altered in the store, `StoreUnavailable` if the store cannot be reached, or the local folder cannot be written.
    """
    uri, digest = row.manifest_uri, row.manifest_digest
    if tiers.store is None:
        manifest = manifests.read_manifest(uri, digest, tiers.files)
        verify(row, manifest, tiers.files, done)
        for entry in manifest.files:
            if entry.folder:  # the store was another place
                _have(entry, folder_of(uri), uri, tiers.files)
        return Restored(manifest=manifest, folder=folder_of(uri), fetched=[])
    folder = tiers.folder(folder_name_of(uri))
    content = manifests.manifest_content(uri, digest, tiers.files, copy=folder)
    manifest = manifests.parse_manifest(content, origin=uri)
    came = manifests.of_each(manifest.files, lambda entry: _have(entry, folder, uri, tiers.files), done)
    fetched = [entry.path for entry, fresh in zip(manifest.files, came, strict=True) if fresh]
    with storing(folder):
        write_durably(folder / MANIFEST, content)
    return Restored(manifest=manifest, folder=folder, fetched=fetched)


def _have(entry: manifests.FileEntry, folder: Path, manifest_uri: str, files: StoreFiles) -> bool:
    """Provide one file of the local copy. Return True if it came from the store."""
    path = folder / entry.path
    with suppress(CheckpointDamaged, StoreUnavailable):
        manifests.verify_entry(replace(entry, folder=""), str(folder), StoreFiles(deadline_s=0.0))
        return False
    with storing(folder):
        for parent in reversed(path.relative_to(folder).parents):
            place = folder / parent
            if parent.parts and (place.is_symlink() or place.is_file()):  # nothing is written through a symbolic link
                place.unlink()
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_beside(path) as temporary:
            _fetch(entry, manifest_uri, files, temporary)
            temporary.rename(path)
    return True


def _fetch(entry: manifests.FileEntry, manifest_uri: str, files: StoreFiles, target: Path) -> None:
    address = below(entry.folder_in(folder_uri(manifest_uri)), entry.path)
    try:
        if address in files.damaged:
            raise CheckpointDamaged(f"expected {address!r} to have digest {entry.digest}, found another one before")
        files.fetch(address, target)
    except FileNotFoundError as err:
        manifests.check_there(manifest_uri, files)
        raise CheckpointDamaged(f"expected the file {address!r} of a committed checkpoint, found none") from err
    try:
        manifests.verify_file(entry, str(target), StoreFiles(deadline_s=0.0))
    except CheckpointDamaged as err:
        files.damaged[address] = 0, ""
        raise CheckpointDamaged(str(err).replace(str(target), address)) from err
