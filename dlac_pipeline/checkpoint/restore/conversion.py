"""Checkpoints converted to another number of ranks: made once, verified, never partial. See docs/extensions/deepspeed.md."""

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.engines.engine import Convert, Engine
from dlac_pipeline.checkpoint.manifest import FileEntry, verify_entries
from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.lakehouse.durable_io import fsync_path, write_durably
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.lakehouse.own_folders import remove_tree
from dlac_pipeline.lakehouse.store_files import StoreFiles, file_digest

_log = logging.getLogger(__name__)
_RECORD = "conversion.json"
_LOCK = ".lock"
_POLL_S = 0.1
_FORMAT_VERSION = 1


def load_state(
    engine: Engine, folder: Path, *, saved_world_size: int, tree: RankTree, converts: bool, patience_s: float
) -> tuple[float, float]:
    """Load the checkpoint in `folder`, which `saved_world_size` ranks saved, converted if these ranks need it. Collective.

    `converts` is True for one rank of every node. Return the seconds until it was converted, and the seconds of the load. Raise
    `WorldSizeUnsupported` if it cannot be converted. Otherwise raises as `convert_checkpoint` and `Engine.load`.
    """
    started = time.monotonic()
    convert = engine.conversion(saved_world_size)
    convert_s = 0.0
    if convert is not None:
        with failing_together(tree, doing=f"converting the checkpoint in {str(folder)!r}"):
            if converts:
                convert_checkpoint(folder, convert, patience_s=patience_s)
        folder, convert_s = _folder_of(folder), time.monotonic() - started
    started = time.monotonic()
    engine.load(folder, saved_world_size=saved_world_size)
    return convert_s, time.monotonic() - started


def convert_checkpoint(folder: Path, convert: Convert, *, patience_s: float = 150.0) -> Path:
    """Return the conversion of the checkpoint in `folder`, whose digests are verified. Make it if it does not exist.

    Another process that converts something of this run is waited for, until it has written nothing for `patience_s`. Raise
    `StoreUnavailable` if the conversion cannot be written.
    """
    target = _folder_of(folder)
    with storing(target):
        if _holds(target):
            return target
        with _only_one(target.parent, patience_s) as alone:
            if not _holds(target):
                _remove([*(_unfinished(target) if alone else ()), target])  # another's may be half made
                _make(folder, target, convert)
    return target


def discard_conversion(folder: Path) -> None:
    """Remove the conversion of the checkpoint in `folder`, whole or not. Raise `OSError` if it still exists."""
    target = _folder_of(folder)
    _remove([*_unfinished(target), target])


def _remove(folders: Iterable[Path]) -> None:
    for each in folders:
        if each.exists():
            remove_tree(each)


@contextmanager
def _only_one(parent: Path, patience_s: float) -> Iterator[bool]:
    """Yield whether this is the only process that converts something of this run. The lock ends with its process."""
    parent.mkdir(exist_ok=True)  # in the run's folder, which is there
    with (parent / _LOCK).open("a+") as lock:
        alone = _taken(lock, parent, patience_s)
        if alone:
            lock.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=lock, flush=True)
        else:
            lock.seek(0)
            holder = lock.read() or "another process"
            _log.warning(
                f"expected {holder}, which holds {lock.name!r}, to convert a checkpoint, found nothing new for "
                f"{patience_s:.0f} s: it is converted beside it; end that process if it is frozen"
            )
        yield alone


def _taken(lock: IO[str], parent: Path, patience_s: float) -> bool:
    """Return True if the lock is held, after a wait while its holder writes."""
    while True:
        sizes = file_sizes(parent)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(_POLL_S)
        if file_sizes(parent) == sizes:
            return False


def file_sizes(parent: Path) -> dict[str, int]:
    """Return the sizes of all files in a folder, by path."""
    found: dict[str, int] = {}
    for folder, _, names in os.walk(parent):
        for name in names:
            with suppress(FileNotFoundError):
                found[f"{folder}/{name}"] = os.stat(f"{folder}/{name}").st_size
    return found


def _make(folder: Path, target: Path, convert: Convert) -> None:
    stage = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        stage.mkdir()
        convert(folder, stage)
        _seal(stage)
        try:
            stage.rename(target)
        except OSError:  # two converted it at once, and the other was first
            if not _holds(target):
                raise
        fsync_path(target.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _seal(stage: Path) -> None:
    found = []
    for path in sorted(each for each in stage.rglob("*") if each.is_file()):
        fsync_path(path)
        found.append(FileEntry(path=str(path.relative_to(stage)), bytes=path.stat().st_size, digest=file_digest(path)))
    for path in [stage, *(each for each in stage.rglob("*") if each.is_dir())]:
        fsync_path(path)
    record = {"format_version": _FORMAT_VERSION, "files": [asdict(entry) for entry in found]}
    write_durably(stage / _RECORD, json.dumps(record).encode())


def _holds(target: Path) -> bool:
    try:
        record = json.loads((target / _RECORD).read_bytes())
        if record["format_version"] != _FORMAT_VERSION:
            return False
        verify_entries([FileEntry(**entry) for entry in record["files"]], str(target), StoreFiles(deadline_s=0.0))
    except (OSError, ValueError, KeyError, TypeError, CheckpointDamaged, StoreUnavailable):  # it can be made again
        return False
    return True


def _folder_of(folder: Path) -> Path:
    """`folder` is `<run>/attempt-<n>/step-<m>-<nonce>`, whose last part no other checkpoint has."""
    return folder.parent.parent / "converted" / folder.name


def _unfinished(target: Path) -> list[Path]:
    return sorted(target.parent.glob(f".{target.name}-*"))
