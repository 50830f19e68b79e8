"""The manifest: a checkpoint's files with digests, and the ledger rows that make it exist. Later versions read format 1."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from dlac_pipeline.checkpoint.store import MANIFEST, attempt_of
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, FormatTooNew, StoreUnavailable
from dlac_pipeline.lakehouse.ledger.older_ledger import commit_mark, mark_in
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION
from dlac_pipeline.lakehouse.store_files import StoreFiles, below, file_identity, is_local, path_at
from dlac_pipeline.spec.job_spec import JobSpec

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Done = Callable[[int, int], None]
"""Receiver of the progress: how many bytes of files are done, and of how many."""
_THREADS = 4
_WITH_FOLDERS, _WITH_MESH = 2, 3
"""Formats of a manifest with a file that has a `folder`, and with a mesh. An older DLAC refuses them."""
_FOLDER = re.compile(r"attempt-\d+/step-[\w-]+", re.ASCII)
_TRAINING = {"source", "mixture", "sequences", "order", "params"}
"""Sections that determine training. Places, the number of ranks and their supervision change no model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file of a checkpoint. `path` is relative to the manifest's folder, or to another `folder` of the run, in the store."""

    path: str
    bytes: int
    digest: str
    folder: str = ""
    """Name of the checkpoint that has the file, which seldom changes. Empty: an ordinary file of this one."""

    def folder_in(self, folder: str) -> str:
        """Return the address of the folder that has the file. `folder` is the address of the checkpoint's folder."""
        return below(folder.rsplit("/", 2)[0], self.folder) if self.folder else folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A complete checkpoint."""

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
    """The run's ledger rows since the parent's checkpoint, and this one's, without what only the commit decides."""
    config_digest: str = ""
    """Digest of the training settings and the script (`config_digest`)."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Dimensions of a replica of the model, if it has several ranks, as in launch.mesh."""
    format_version: int = FORMAT_VERSION

    @property
    def model_digest(self) -> str:
        """Digest of all files: names the model state, wherever it is copied."""
        listing = sorted((entry.path, entry.digest) for entry in self.files)
        return blake3(json.dumps(listing).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The manifest as it is stored."""
        columns = asdict(self)
        for entry in columns["files"]:
            if entry["folder"] == "":
                del entry["folder"]
            else:
                columns["format_version"] = _WITH_FOLDERS
        if self.mesh:
            columns["format_version"] = _WITH_MESH
        else:
            del columns["mesh"]
        return json.dumps(columns, sort_keys=True, default=str, separators=(",", ":")).encode()


def config_digest(spec: JobSpec) -> str:
    """BLAKE3 of the spec's training sections and of the script with its arguments, as hex."""
    config = spec.model_dump(mode="json", include=_TRAINING)
    config |= {"script": None, "args": spec.launch.args}
    with suppress(OSError):  # as when another launcher was given another script
        config["script"] = blake3(Path(spec.launch.script).read_bytes()).hexdigest()
    return blake3(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def mark_committed(manifest: Manifest, run_folder: str, files: StoreFiles) -> None:
    """Replace the run's commit mark, which shows that a ledger without this checkpoint is older. A failure is logged."""
    mark = commit_mark(
        ledger_uuid=manifest.ledger_uuid, run=manifest.run, checkpoint_id=manifest.checkpoint_id, step=manifest.step
    )
    try:
        files.write(mark_in(run_folder, manifest.ledger_uuid), mark, within=run_folder)
    except (StoreUnavailable, OSError) as err:  # the checkpoint is committed without it
        _log.warning("expected to mark checkpoint %s as committed, found %s", manifest.checkpoint_id, err)


def content_digest(content: bytes) -> str:
    """The digest by which the ledger names a manifest."""
    return blake3(content).hexdigest()


def read_manifest(manifest_uri: str, digest: str, files: StoreFiles, *, copy: Path | None = None) -> Manifest:
    """Return the manifest at this address, or from the folder `copy`. Raises as `manifest_content` and `parse_manifest`."""
    return parse_manifest(manifest_content(manifest_uri, digest, files, copy=copy), origin=manifest_uri)


def manifest_content(manifest_uri: str, digest: str, files: StoreFiles, *, copy: Path | None = None) -> bytes:
    """Return the manifest as it is stored. Raise `CheckpointDamaged` if it is missing or altered, or as `check_there`."""
    if copy is not None:
        with suppress(OSError):
            content = (copy / MANIFEST).read_bytes()
            if content_digest(content) == digest:
                return content
    try:
        content = files.read(manifest_uri)
    except FileNotFoundError as err:
        check_there(manifest_uri, files)
        raise CheckpointDamaged(f"expected a manifest at {manifest_uri!r}, found none") from err
    if content_digest(content) != digest:
        raise CheckpointDamaged(f"expected the manifest {manifest_uri!r} to have digest {digest}, found other content")
    return content


def parse_manifest(content: bytes, *, origin: str) -> Manifest:
    """Return a manifest as it was stored. Raise `FormatTooNew` if a newer DLAC wrote it.

    Raise `CheckpointDamaged` if it is no manifest, or names a file that is not in its folder.
    """
    try:
        raw = json.loads(content)
        version = int(raw["format_version"])
    except (ValueError, TypeError, KeyError) as err:
        raise CheckpointDamaged(f"expected a manifest in {origin!r}, found {type(err).__name__}: {err}") from err
    if version > _WITH_MESH:
        raise FormatTooNew(
            f"manifest {origin!r} has format version {raw['format_version']}, this DLAC reads up to {_WITH_MESH}"
        )
    try:
        manifest = Manifest(**{**raw, "files": [FileEntry(**entry) for entry in raw["files"]]})
    except (TypeError, KeyError) as err:
        raise CheckpointDamaged(f"expected the fields of a manifest in {origin!r}, found {err}") from err
    _check_paths(manifest.files, origin)
    return manifest


def _check_paths(entries: Sequence[FileEntry], origin: str) -> None:
    """Check that all files are below the manifest's folder, each is named once, and none is the manifest."""
    seen = {MANIFEST}
    for entry in entries:
        path = entry.path
        wrong = not isinstance(path, str) or set(path.split("/")) & {"", ".", ".."} or "\\" in path
        wrong = wrong or (entry.folder != "" and not _FOLDER.fullmatch(str(entry.folder)))
        if wrong or not path.isprintable() or path in seen:
            raise CheckpointDamaged(
                f"expected distinct paths below the manifest's folder in {origin!r}, found {path!r}: nothing was read or "
                "written there"
            )
        seen.add(path)


def check_there(manifest_uri: str, files: StoreFiles) -> None:
    """Raise `StoreUnavailable` if the folder above a checkpoint does not exist either, which is no loss of the checkpoint."""
    attempt = manifest_uri.rsplit("/", 2)[0]
    if is_local(manifest_uri):
        exists = path_at(attempt).is_dir()
    else:  # an object store has no empty folders
        exists = any(attempt_of(name) is not None for name in files.children(attempt.rsplit("/", 1)[0]))
    if not exists:
        raise StoreUnavailable(f"expected checkpoints at {attempt!r} in the store, found nothing: mount the store")


def verify_files(manifest: Manifest, folder: str, files: StoreFiles, done: Done = lambda done, total: None) -> None:
    """Re-read every file in the folder at this address, and compare size and digest. `done` receives the progress.

    Raise `CheckpointDamaged` with the first file that is missing or altered, `StoreUnavailable` if one cannot be read.
    """
    with store_there(below(folder, MANIFEST), files):
        verify_entries(manifest.files, folder, files, done)


@contextmanager
def store_there(manifest_uri: str, files: StoreFiles) -> Iterator[None]:
    """Distinguish damage that is found inside from a store whose mount is gone since then. Raises as `verify_files`."""
    try:
        yield
    except CheckpointDamaged:
        check_there(manifest_uri, files)
        raise


def verify_entries(
    entries: Sequence[FileEntry], folder: str, files: StoreFiles, done: Done = lambda done, total: None
) -> None:
    """Verify only the given files, as `verify_files` does."""
    of_each(entries, lambda entry: verify_entry(entry, folder, files), done)


def of_each(entries: Sequence[FileEntry], work: Callable[[FileEntry], Result], done: Done) -> list[Result]:
    """Return the results of `work` for each entry, in threads. After an error of `work` or `done`, no more begin."""
    results: list[Result] = []
    so_far, total = 0, sum(entry.bytes for entry in entries)
    done(so_far, total)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint files") as pool:
        try:
            for entry, result in zip(entries, pool.map(work, entries), strict=True):
                results.append(result)
                so_far += entry.bytes
                done(so_far, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def verify_entry(entry: FileEntry, folder: str, files: StoreFiles) -> None:
    """Compare one file of the checkpoint in the folder at this address with its entry. Raises as `verify_files`."""
    folder = entry.folder_in(folder)
    check_inside(entry, folder)
    verify_file(entry, below(folder, entry.path), files)


def check_inside(entry: FileEntry, folder: str) -> None:
    """Raise `CheckpointDamaged` if a symbolic link leads from a local folder to a file elsewhere."""
    if is_local(folder):
        path = path_at(folder)
        # `resolve` raises for a loop of links, which is found when the file is read.
        if not Path(realpath(path / entry.path)).is_relative_to(realpath(path)):
            raise CheckpointDamaged(
                f"expected the file {entry.path!r} in the checkpoint's folder {str(path)!r}, found a symbolic link to a place "
                "outside of it"
            )


def verify_file(entry: FileEntry, address: str, files: StoreFiles) -> None:
    """Compare one file with its entry. Raises as `verify_files`."""
    try:
        identity = file_identity(address)
        size, digest = files.damaged.get(identity) or files.digest(address)
    except FileNotFoundError as err:
        raise CheckpointDamaged(f"expected the file {address!r} of a committed checkpoint, found none") from err
    if (size, digest) != (entry.bytes, entry.digest):
        files.damaged[identity] = size, digest
    if size != entry.bytes:
        raise CheckpointDamaged(f"expected {entry.bytes} bytes in {address!r}, found {size}")
    if digest != entry.digest:
        raise CheckpointDamaged(f"expected {address!r} to have digest {entry.digest}, found {digest}")
