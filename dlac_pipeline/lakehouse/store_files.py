"""Files of the checkpoint store at their addresses: on a mounted disk, or in an object store.

Addresses are `file://` ones, `s3://` ones, and what pyarrow's file systems serve (gs, abfs, hdfs), with pyiceberg's properties
(`s3.endpoint`, ...). What fails in passing is tried again, at growing random intervals, until a deadline.
"""

import errno
import logging
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import pyarrow.fs as pafs
from blake3 import blake3
from pyiceberg.io.pyarrow import PyArrowFileIO
from tenacity import RetryCallState, retry_if_exception

from dlac_pipeline.lakehouse import s3_objects
from dlac_pipeline.lakehouse.durable_io import fsync_path, make_folder_durably, temporary_beside, write_durably
from dlac_pipeline.lakehouse.errors import SpecInvalid, StoreUnavailable
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.lakehouse.own_folders import remove_tree
from dlac_pipeline.lakehouse.retrying import is_final, retrying
from dlac_pipeline.lakehouse.s3_objects import Objects, S3Objects

_CHUNK_BYTES = 8 << 20
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of a path at which no file is: a loop of links, a file in place of a folder, a link to a name that is too long."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def is_local(address: str) -> bool:
    """Return True if `address` is a path of this node, or a `file://` address."""
    return "://" not in address or address.startswith("file://")


def path_at(address: str) -> Path:
    """The path of a local address."""
    return Path(unquote(address.removeprefix("file://"))) if "://" in address else Path(address)


def below(address: str, *names: str) -> str:
    """The address of something below `address`."""
    return "/".join([address.rstrip("/"), *names])


class StoreFiles:
    """Access to files of a store. Safe to use from several threads."""

    def __init__(self, properties: Mapping[str, str] | None = None, *, deadline_s: float = 60.0) -> None:
        """`deadline_s`: how long something that fails is tried again."""
        self._remote = PyArrowFileIO(dict(properties or {}))
        self._buckets: dict[str, S3Objects] = {}
        self._deadline_s = deadline_s
        self.damaged: dict[object, tuple[int, str]] = {}
        """Identity -> bytes and digest of files that differ from their entries: checkpoints that share one read it once."""

    def hurried(self) -> "StoreFiles":
        """Return the same store for optional work, with retries for a few seconds only."""
        return StoreFiles(self._remote.properties, deadline_s=min(5.0, self._deadline_s))

    def make(self, address: str) -> None:
        """Make a folder with all above it. An object store needs none.

        Raises:
            StoreUnavailable: the store is full, refuses, or was unavailable past the deadline. So do all methods.
        """
        self._tried(lambda files, path: files.make(path), address, "write to")

    def put(self, source: Path, address: str, *, within: str) -> None:
        """Copy a local file to `address`, durably. No file is at `address` yet.

        `within` is the address of an existing folder above it. Only folders below that one are made.
        """
        self._tried(lambda files, path: files.put(source, path, within), address, "write to")

    def write(self, address: str, content: bytes, *, within: str, new: bool = False) -> None:
        """Make a small file durable: whole, or not at all. `within` as in `put`. S3 refuses a `new` one of another writer."""
        self._tried(lambda files, path: files.write(path, content, within, new=new), address, "write to")

    def read(self, address: str) -> bytes:
        """All of a small file. Raises `FileNotFoundError` if there is none."""
        return self._tried(lambda files, path: files.read(path), address, "read")

    def fetch(self, address: str, target: Path) -> None:
        """Copy a file into a local one. Raises `FileNotFoundError` if there is none."""
        self._tried(lambda files, path: files.fetch(path, target), address, "read")

    def digest(self, address: str) -> tuple[int, str]:
        """Bytes and BLAKE3 digest of a file's content. Raises `FileNotFoundError` if there is none."""
        return self._tried(lambda files, path: files.digest(path), address, "read")

    def children(self, address: str) -> list[str]:
        """Return the sorted names of files and folders in a folder. Empty if the folder does not exist."""
        return self._tried(lambda files, path: files.children(path), address, "list")

    def remove(self, address: str) -> None:
        """Remove a folder with all in it, if it exists."""
        self._tried(lambda files, path: files.remove(path), address, "remove from")

    def _tried(self, call: "Callable[[_Local | S3Objects | _Remote, str], Result]", address: str, doing: str) -> Result:
        def warn_once(tried: RetryCallState) -> None:
            if tried.attempt_number == 1 and tried.outcome is not None:
                found, message = tried.outcome.exception(), "expected to %s the checkpoint store at %s, found %s; %s"
                again = f"trying again for {self._deadline_s:.0f} s"
                _log.warning(message, doing, mask_secrets(address), mask_secrets(str(found)), again)

        tries = retrying(self._deadline_s).copy(retry=retry_if_exception(_is_transient), before_sleep=warn_once)
        try:
            return tries(lambda: call(*self._at(address)))
        except FileNotFoundError:
            raise
        except OSError as err:
            how_long = f", for {self._deadline_s:.0f} s" if _is_transient(err) else ""
            raise StoreUnavailable(
                f"expected to {doing} the checkpoint store at {address!r}, found {type(err).__name__}{how_long}: {err}; "
                "free, mount or reach it: the last committed checkpoint is untouched"
            ) from err

    def _at(self, address: str) -> "tuple[_Local | S3Objects | _Remote, str]":
        if is_local(address):
            return _LOCAL, str(path_at(address))
        scheme, netloc, path = PyArrowFileIO.parse_location(address)
        if scheme in s3_objects.SCHEMES and s3_objects.serves(self._remote.properties):
            if netloc not in self._buckets:
                self._buckets[netloc] = S3Objects(netloc, self._remote.properties)
            return self._buckets[netloc], path
        try:
            return _Remote(self._remote.fs_by_scheme(scheme, netloc)), path
        except ValueError as err:
            raise SpecInvalid(
                f"expected a folder, or an address such as s3://bucket/path, for checkpoints, found {address!r}: {err}"
            ) from err


def file_identity(address: str) -> object:
    """Return an equal value for all names of one file, until it is written."""
    with suppress(OSError):
        if is_local(address):
            found = path_at(address).stat()
            return found.st_dev, found.st_ino, found.st_mtime_ns
    return address


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a local file's content, as hex. Large files use all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def make_below(above: Path, folder: Path, *, mode: int = 0o777) -> None:
    """Create `folder`, and the missing folders between it and `above`, with durable names.

    `above` is never created. If its mount is gone, nothing is written into the bare mount point, where a later mount would hide
    it.

    Raises `OSError` if `above` does not exist any more, or a folder cannot be created.
    """
    if folder.is_dir():
        return
    path = above
    try:
        for name in folder.relative_to(above).parts:
            path /= name
            path.mkdir(mode, exist_ok=True)
            fsync_path(path.parent)
    except FileNotFoundError as err:
        raise OSError(f"no folder {str(above)!r}, which was there when the attempt began: mount it again") from err


class _Local:
    def make(self, path: str) -> None:
        make_folder_durably(Path(path))

    def put(self, source: Path, path: str, within: str) -> None:
        target = Path(path)
        make_below(path_at(within), target.parent)
        with temporary_beside(target) as temporary:
            shutil.copyfile(source, temporary)
            fsync_path(temporary)
            temporary.rename(target)
        for folder in (target.parent, *list(target.parents)[1:4]):  # the folders may be new themselves
            fsync_path(folder)

    def write(self, path: str, content: bytes, within: str, *, new: bool = False) -> None:
        make_below(path_at(within), Path(path).parent)
        write_durably(Path(path), content)

    def read(self, path: str) -> bytes:
        _check_file(path)
        return Path(path).read_bytes()

    def fetch(self, path: str, target: Path) -> None:
        _check_file(path)
        shutil.copyfile(path, target)

    def digest(self, path: str) -> tuple[int, str]:
        return _check_file(path), file_digest(Path(path))

    def children(self, path: str) -> list[str]:
        folder = Path(path)
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []

    def remove(self, path: str) -> None:
        if Path(path).exists():
            remove_tree(Path(path))


_LOCAL = _Local()


class _Remote(Objects):
    """A file system of pyarrow. Its objects appear whole when they are closed."""

    def __init__(self, files: pafs.FileSystem) -> None:
        self._files = files

    def put(self, source: Path, path: str, within: str) -> None:
        with source.open("rb") as stream, self._files.open_output_stream(path) as target:
            while chunk := stream.read(_CHUNK_BYTES):
                target.write(chunk)
        size, stored = source.stat().st_size, self._files.get_file_info(path).size
        if stored != size:
            raise OSError(f"{stored} of {size} bytes arrived")

    def write(self, path: str, content: bytes, within: str, *, new: bool = False) -> None:
        with self._files.open_output_stream(path) as target:
            target.write(content)

    def read(self, path: str) -> bytes:
        with self._files.open_input_stream(path) as stream:
            return bytes(stream.read())

    def children(self, path: str) -> list[str]:
        selector = pafs.FileSelector(path, allow_not_found=True)
        return sorted(found.base_name for found in self._files.get_file_info(selector))

    def remove(self, path: str) -> None:
        if self._files.get_file_info(path).type != pafs.FileType.NotFound:
            self._files.delete_dir(path)

    def _chunks(self, path: str) -> Iterator[bytes]:
        with self._files.open_input_stream(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk


def _check_file(path: str) -> int:
    """Return the bytes of a file. Raise `FileNotFoundError` if none can be at the path, or something else is there.

    Waiting helps against none of these. A folder would be an error without a number, and a named pipe would wait for ever.
    """
    try:
        found = Path(path).stat()
    except OSError as err:
        if err.errno in _NO_FILE:
            raise FileNotFoundError(errno.ENOENT, f"no file, but {err.strerror}", path) from err
        raise
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "no file, but a folder, a pipe or a device", path)
    return found.st_size


def _is_transient(err: BaseException) -> bool:
    return isinstance(err, OSError) and not (isinstance(err, FileNotFoundError | FileExistsError) or is_final(err))
