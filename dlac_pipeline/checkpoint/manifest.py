"""The manifest: everything in a checkpoint with sizes and digests, and the ledger rows that make it exist.

Format version 1. Promise: later versions read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from blake3 import blake3

from catalog.durable_io import write_durably
from catalog.errors import CheckpointDamaged, FormatTooNew, StoreUnavailable
from catalog.schemas import FORMAT_VERSION
from dlac_pipeline.checkpoint.store import MANIFEST, file_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint; `path` is relative to the manifest's folder."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One checkpoint, complete."""

    ledger_uuid: str
    run: str
    attempt: int
    checkpoint_id: str
    parent: str | None
    step: int
    world_size: int
    engine: str
    leg: int
    """Number of the leg, whose record is in the ledger."""
    reader_state: list[list[list[int]]]
    """Cursor of each source and key group: [pass, block, position, offset]."""
    files: list[FileEntry]
    libraries: dict[str, str]
    ledger_rows: list[dict[str, Any]]
    """The run's ledger rows since the parent's checkpoint, and this one's; without what only the commit decides."""
    config_digest: str = ""
    """Of what the model is trained with (`config.config_digest`); empty in manifests of before there was one."""
    format_version: int = FORMAT_VERSION

    @property
    def model_digest(self) -> str:
        """Digest of all files: names the model state, wherever it is copied."""
        listing = sorted((entry.path, entry.digest) for entry in self.files)
        return blake3(json.dumps(listing).encode()).hexdigest()

    def write(self, folder: Path) -> str:
        """Write the manifest into `folder`, last of all its files; returns its digest."""
        content = json.dumps(asdict(self), sort_keys=True, default=str, separators=(",", ":")).encode()
        write_durably(folder / MANIFEST, content)
        return blake3(content).hexdigest()


def folder_of(manifest_uri: str) -> Path:
    """The folder that a manifest's `file://` address lies in."""
    return Path(unquote(urlparse(manifest_uri).path)).parent


def read_manifest(manifest_uri: str, digest: str) -> Manifest:
    """The manifest at this address.

    Raises:
        CheckpointDamaged: it is missing or is not what was committed.
        StoreUnavailable: the store it lies in is not there at all.
        FormatTooNew: a newer DLAC wrote it.
    """
    folder = folder_of(manifest_uri)
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as err:
        attempt = folder.parent  # a file or a checkpoint gets lost; a whole attempt is away when the store is
        if not attempt.is_dir():
            raise StoreUnavailable(
                f"expected the folder {str(attempt)!r} in the checkpoint store, found nothing: mount the store"
            ) from err
        raise CheckpointDamaged(f"expected a manifest at {manifest_uri!r}, found none") from err
    except OSError as err:
        raise StoreUnavailable(f"expected to read {manifest_uri!r}, found {err}") from err
    if blake3(content).hexdigest() != digest:
        raise CheckpointDamaged(
            f"expected the manifest {manifest_uri!r} to have digest {digest}, found another content"
        )
    raw = json.loads(content)
    if raw["format_version"] > FORMAT_VERSION:
        raise FormatTooNew(
            f"manifest {manifest_uri!r} has format version {raw['format_version']}, this DLAC reads up to {FORMAT_VERSION}"
        )
    return Manifest(**{**raw, "files": [FileEntry(**entry) for entry in raw["files"]]})


def verify_files(manifest: Manifest, folder: Path) -> None:
    """Re-read every file and compare size and digest.

    Raises:
        CheckpointDamaged: names the first file that is missing, truncated or altered.
        StoreUnavailable: a file cannot be read for another reason.
    """
    verify_entries(manifest.files, folder)


def verify_entries(entries: Iterable[FileEntry], folder: Path) -> None:
    """As `verify_files`, of these files."""
    with ThreadPoolExecutor(4, thread_name_prefix="verify") as pool:
        for _ in pool.map(lambda entry: _verify(entry, folder), entries):
            pass


def _verify(entry: FileEntry, folder: Path) -> None:
    path = folder / entry.path
    try:
        size = path.stat().st_size
        digest = file_digest(path) if size == entry.bytes else ""
    except FileNotFoundError as err:
        raise CheckpointDamaged(f"expected the file {str(path)!r} of a committed checkpoint, found none") from err
    except OSError as err:
        raise StoreUnavailable(f"expected to read {str(path)!r}, found {err}") from err
    if size != entry.bytes:
        raise CheckpointDamaged(f"expected {entry.bytes} bytes in {str(path)!r}, found {size}")
    if digest != entry.digest:
        raise CheckpointDamaged(f"expected {str(path)!r} to have digest {entry.digest}, found {digest}")
