"""Objects of an S3 bucket, through obstore: whole objects, multipart uploads, and new names that only one writer gets."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from blake3 import blake3
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store
from pyarrow.fs import resolve_s3_region

from dlac_pipeline.lakehouse.errors import SpecInvalid

SCHEMES = ("s3", "s3a", "s3n")
SETTINGS = {
    "s3.endpoint": "endpoint",
    "s3.access-key-id": "access_key_id",
    "s3.secret-access-key": "secret_access_key",
    "s3.session-token": "session_token",
    "s3.region": "region",
    "s3.anonymous": "skip_signature",
    "s3.force-virtual-addressing": "virtual_hosted_style_request",
}
_PROXY = "s3.proxy-uri"
_SECONDS = {"s3.connect-timeout": ("connect_timeout", "5"), "s3.request-timeout": ("timeout", "30")}
"""Settings in seconds, and their defaults. A part of an upload is one request."""
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
"""Seconds for one part, so that an upload of many does not begin again. The caller repeats a request that takes longer."""
_ONE_REQUEST_BYTES = 64 << 20
"""Larger objects are uploaded in parts. obstore can make only a single request conditional."""
_CHUNK_BYTES = 8 << 20
_ENVIRONMENT = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
_used_by: dict[int, bool] = {}
"""Processes that have opened a bucket, by id: this one, or the one from which it was forked."""


def serves(properties: Mapping[str, str]) -> bool:
    """Return True if obstore knows all of PyIceberg's S3 settings, and will find the credentials.

    Roles, signers, and the profiles of the AWS command line are known to pyarrow only.
    """
    known = {*SETTINGS, _PROXY, *_SECONDS}
    if _used_by.keys() - {os.getpid()}:
        return False  # this process was forked from one that uses obstore, whose threads it lacks
    foreign = any(name.startswith("s3.") and name not in known for name in properties)
    profile = "AWS_PROFILE" in os.environ or Path("~/.aws/credentials").expanduser().exists()
    return not foreign and ("s3.access-key-id" in properties or not profile)


class Objects:
    """Objects of a store without folders. A subclass reads one in `_chunks`."""

    def make(self, path: str) -> None:
        """Make nothing: there are no folders."""

    def fetch(self, path: str, target: Path) -> None:
        """Write an object into a local file."""
        with target.open("wb") as into:
            for chunk in self._chunks(path):
                into.write(chunk)

    def digest(self, path: str) -> tuple[int, str]:
        """Return an object's size and its BLAKE3 digest."""
        size, hasher = 0, blake3(max_threads=blake3.AUTO)
        for chunk in self._chunks(path):
            size += len(chunk)
            hasher.update(chunk)
        return size, hasher.hexdigest()

    def _chunks(self, path: str) -> Iterator[bytes | memoryview]:
        raise NotImplementedError


class S3Objects(Objects):
    """A bucket. Paths are `bucket/key`, as pyarrow writes them."""

    def __init__(self, bucket: str, properties: Mapping[str, str]) -> None:
        settings: dict[str, Any] = {ours: properties[name] for name, ours in SETTINGS.items() if name in properties}
        if not {"region", "endpoint"} & settings.keys() and not any(name in os.environ for name in _ENVIRONMENT):
            settings["region"] = resolve_s3_region(bucket)
        client: dict[str, Any] = {"proxy_url": properties[_PROXY]} if _PROXY in properties else {}
        client |= {ours: f"{properties.get(name, default)}s" for name, (ours, default) in _SECONDS.items()}
        settings["client_options"] = {**client, "allow_http": True}  # where the endpoint is written so
        _used_by[os.getpid()] = True
        try:
            self._store = S3Store(bucket, retry_config=_RETRIES, **settings)
        except BaseError as err:
            raise SpecInvalid(
                f"expected S3 settings that obstore takes, found: {_first_line(err)}: correct them"
            ) from err

    def put(self, source: Path, path: str, within: str) -> None:
        """Upload a file to a new name, else raise `FileExistsError`. Two large uploads at a time are not kept apart."""
        with _as_os_errors():
            if source.stat().st_size <= _ONE_REQUEST_BYTES:
                self._create(path, source.read_bytes())
            elif not self._is_same(source, path):
                self._store.put(_key(path), source)

    def write(self, path: str, content: bytes, within: str, *, new: bool = False) -> None:
        """Write a small object. If it is `new`, its name must be new too. Raises as `put`."""
        with _as_os_errors():
            if new:
                self._create(path, content)
            else:
                self._store.put(_key(path), content)

    def read(self, path: str) -> bytes:
        """Return a small object's content."""
        with _as_os_errors():
            return bytes(self._store.get(_key(path)).bytes())

    def children(self, path: str) -> list[str]:
        """Return the sorted names one level below a prefix."""
        with _as_os_errors():
            found = self._store.list_with_delimiter(_key(path))
        names = {*found["common_prefixes"], *(each["path"] for each in found["objects"])}
        return sorted(name.rsplit("/", 1)[-1] for name in names - {_key(path)})  # some servers list an empty folder

    def remove(self, path: str) -> None:
        """Delete all objects below a prefix."""
        with _as_os_errors():
            for batch in self._store.list(_key(path)):
                self._store.delete([each["path"] for each in batch])

    def _create(self, path: str, content: bytes) -> None:
        """Create an object. An existing one of the same content may come from a request whose answer was lost."""
        try:
            self._store.put(_key(path), content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            if self.read(path) != content:
                raise _other_writer(path) from None

    def _is_same(self, source: Path, path: str) -> bool:
        """Return True if the object exists with this content, and False if its name is new."""
        try:
            size = self._store.head(_key(path))["size"]
        except FileNotFoundError:
            return False
        local = blake3(max_threads=blake3.AUTO).update_mmap(source).hexdigest()
        if size != source.stat().st_size or self.digest(path)[1] != local:
            raise _other_writer(path)
        return True

    def _chunks(self, path: str) -> Iterator[memoryview]:
        with _as_os_errors():
            for chunk in self._store.get(_key(path)).stream(min_chunk_size=_CHUNK_BYTES):
                yield memoryview(chunk)


def _key(path: str) -> str:
    return path.partition("/")[2]


def _other_writer(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "another writer has made the object", path)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn obstore's errors into errors of file systems, of one line. A missing object is a FileNotFoundError already."""
    try:
        yield
    except FileNotFoundError as err:
        if "NoSuchBucket" in str(err):
            raise OSError("NoSuchBucket: the bucket does not exist") from err
        raise
    except (PermissionDeniedError, UnauthenticatedError) as err:
        raise PermissionError(errno.EACCES, _first_line(err)) from err
    except BaseError as err:
        raise OSError(_first_line(err)) from err


def _first_line(err: Exception) -> str:
    return str(err).split("\n", 1)[0]
