"""Checkpoints converted to another number of ranks: made once, verified, never half.

In: a checkpoint's folder whose digests hold, and the engine's way to convert it. Out: `<run>/converted/<checkpoint>/`, with a
record of its files that is written last. It is made under a name that nobody else has, and renamed when it is whole: killed
anywhere, it is made again; of two at the same time, one waits and uses what the other made. No ledger row names it: it can
always be made again, and goes with its checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from catalog.durable_io import fsync_directory, write_durably
from catalog.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.checkpoint.engines.engine import Convert, Engine
from dlac_pipeline.checkpoint.failures import failing_together
from dlac_pipeline.checkpoint.files import StoreFiles, file_digest, sync_file
from dlac_pipeline.checkpoint.manifest import FileEntry, verify_entries
from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.checkpoint.tree import RankTree

_RECORD = "conversion.json"
_LOCK = ".lock"
_FORMAT_VERSION = 1


def load_state(
    engine: Engine, folder: Path, *, saved_world_size: int, tree: RankTree, converts: bool
) -> tuple[float, float]:
    """Load the checkpoint in `folder`, which `saved_world_size` ranks saved, converted if these ranks need it. Collective.

    `converts` for one rank of every machine. Gives the seconds until it was converted, and those of the load.

    Raises:
        WorldSizeUnsupported: it cannot be converted.
        StoreUnavailable: there is no room for the conversion.
        CheckpointDamaged, CheckpointUnsafe: from the engine.
    """
    started = time.monotonic()
    convert = engine.conversion(saved_world_size)
    if convert is not None:
        with failing_together(tree, doing=f"converting the checkpoint in {str(folder)!r}"):
            if converts:
                converted(folder, convert)
        folder = _folder_of(folder)
    convert_s = time.monotonic() - started if convert is not None else 0.0
    started = time.monotonic()
    engine.load(folder, saved_world_size=saved_world_size)
    return convert_s, time.monotonic() - started


def converted(folder: Path, convert: Convert) -> Path:
    """The conversion of the checkpoint in `folder`, whose digests hold; made now, unless it is there.

    Raises:
        StoreUnavailable: it cannot be written.
        DlacError: from `convert`.
    """
    target = _folder_of(folder)
    with storing(target), _only_one(target.parent):
        if not _holds(target):
            discard_conversion(folder)
            _make(folder, target, convert)
    return target


def discard_conversion(folder: Path) -> None:
    """Remove what was made of the checkpoint in `folder`, whole or not.

    Raises:
        OSError: it is still there.
    """
    target = _folder_of(folder)
    for each in [*_unfinished(target), target]:
        if each.exists():
            shutil.rmtree(each)


@contextmanager
def _only_one(parent: Path) -> Iterator[None]:
    """Wait while another process converts something of this run; the lock ends with its process."""
    parent.mkdir(exist_ok=True)  # in the run's folder, which is there
    with (parent / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, target: Path, convert: Convert) -> None:
    stage = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        stage.mkdir()
        convert(folder, stage)
        _seal(stage)
        stage.rename(target)
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _seal(stage: Path) -> None:
    """Make all files durable, then say what they are."""
    found = []
    for path in _files(stage):
        sync_file(path)
        found.append(FileEntry(path=str(path.relative_to(stage)), bytes=path.stat().st_size, digest=file_digest(path)))
    for path in [stage, *(each for each in stage.rglob("*") if each.is_dir())]:
        fsync_directory(path)
    record = {"format_version": _FORMAT_VERSION, "files": [asdict(entry) for entry in found]}
    write_durably(stage / _RECORD, json.dumps(record).encode())


def _holds(target: Path) -> bool:
    """Whether there is a conversion, whole and unaltered."""
    try:
        record = json.loads((target / _RECORD).read_bytes())
        if record["format_version"] != _FORMAT_VERSION:
            return False
        verify_entries([FileEntry(**entry) for entry in record["files"]], str(target), StoreFiles(deadline_s=0.0))
    except (OSError, ValueError, KeyError, TypeError, CheckpointDamaged, StoreUnavailable):  # it can be made again
        return False
    return True


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _folder_of(folder: Path) -> Path:
    """`folder` is `<run>/attempt-<n>/step-<m>-<nonce>`, whose last part no other checkpoint has."""
    return folder.parent.parent / "converted" / folder.name


def _unfinished(target: Path) -> list[Path]:
    return sorted(target.parent.glob(f".{target.name}-*"))
