"""Record of an exception that ends a rank, and the party that it blames. Every rank imports this: standard library only."""

import errno
import hashlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from dlac_pipeline.lakehouse.errors import DlacError, PeerLeft
from dlac_pipeline.lakehouse.masking import mask_secrets

Origin = Literal["", "script", "dlac", "passing", "peer"]
"""The party that an exception blames.

- `script`: the user's code.
- `dlac`: code of DLAC that the script called.
- `passing`: a network, a store or a device that may recover.
- `peer`: another rank, whose connection broke.
- empty: an error that DLAC names, or no exception at all.
"""
_Link = TypeVar("_Link", BaseException, traceback.TracebackException)
_TRACEBACK_CHARACTERS = 4000
_PASSING_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EBUSY", "EIO", "ENOMEM", "ENOBUFS", "ENOSPC", "EDQUOT", "ENFILE", "ESTALE", "ETIMEDOUT"),
        *("EREMOTEIO", "EADDRINUSE", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
        *("ENOTCONN", "ESHUTDOWN"),
    )
    if hasattr(errno, name)
)
_NETWORK_ERRORS = frozenset({"gaierror", "herror", "DistNetworkError", "DistStoreError"})
_PEER = re.compile(
    r"gloo|ncclRemoteError|ncclSystemError|ncclInternalError|Connection (closed|reset) by peer|Broken pipe|"
    r"NCCL (error|communicator was aborted)|Timed out waiting \d+ms for (recv|send)"
)
_DEVICE = re.compile(
    r"(CUDA|HIP|XPU) error: (uncorrectable|hardware|unspecified launch failure|unknown error|initialization error|"
    r"all CUDA-capable devices are busy|no CUDA-capable device)|GPU is lost|fallen off the bus"
)


def describe_exception(err: BaseException) -> dict[str, Any]:
    """Return `where`, `place`, `origin` and `traceback` of an exception.

    `where` names the innermost frame of the user's code. `place` is equal for exceptions of one class that were raised at the
    same line, whatever their messages are. Secrets in the texts are masked.
    """
    frames = traceback.extract_tb(err.__traceback__)
    own = [frame for frame in frames if _owner_of(frame.filename) == "user"]
    inner = own[-1] if own else frames[-1] if frames else None
    ends = [(frame.filename, frame.lineno, frame.name) for frame in (inner, *frames[-1:]) if frame is not None]
    return {
        "where": "" if inner is None else mask_secrets(f"{inner.filename}:{inner.lineno} in {inner.name}"),
        "place": hashlib.sha256(repr((type(err).__qualname__, ends)).encode(errors="replace")).hexdigest()[:16],
        "origin": _origin_of(err, frames),
        "traceback": _format_users_frames(err),
    }


def text_of(err: BaseException) -> str:
    """Return the message of an exception, also of one that cannot be converted to text."""
    try:
        return str(err)
    except Exception as failed:
        return f"(its message cannot be read: {type(failed).__name__})"


def _origin_of(err: BaseException, frames: traceback.StackSummary) -> Origin:
    if isinstance(err, DlacError):
        return "peer" if isinstance(err, PeerLeft) else ""
    chain = list(_chain_of(err))
    if any(_is_of_peer(each) for each in chain):
        return "peer"
    if any(_may_pass(each) for each in chain):
        return "passing"
    owners = [owner for frame in frames if (owner := _owner_of(frame.filename))]
    return "dlac" if owners[-1:] == ["dlac"] else "script"


def _chain_of(err: _Link) -> Iterator[_Link]:
    """Yield an exception, or its traceback, and its causes."""
    seen: set[int] = set()
    current: Any = err
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _is_of_peer(err: BaseException) -> bool:
    names = {each.__name__ for each in type(err).__mro__}
    if "DistBackendError" in names:
        return True
    return isinstance(err, RuntimeError) and _PEER.search(text_of(err)) is not None


def _may_pass(err: BaseException) -> bool:
    if isinstance(err, ConnectionError | TimeoutError):
        return True
    if _NETWORK_ERRORS & {each.__name__ for each in type(err).__mro__}:
        return True
    status = _http_status(err)
    if status is not None:
        return status == 429 or 500 <= status < 600
    if isinstance(err, OSError):
        return err.errno in _PASSING_ERRNOS or (err.errno is None and _may_store_recover(err))
    return isinstance(err, RuntimeError) and _DEVICE.search(text_of(err)) is not None


def _may_store_recover(err: OSError) -> bool:
    """Return whether an object store reports, without a number, a failure that may pass."""
    from dlac_pipeline.lakehouse.retrying import may_pass  # an import that a rank does not pay for before its script

    return not isinstance(err, FileNotFoundError | PermissionError) and may_pass(err)


def _http_status(err: BaseException) -> int | None:
    """Return the status of the HTTP answer that an exception of requests, httpx, urllib or botocore reports."""
    answer = getattr(err, "response", None)
    if isinstance(answer, Mapping):
        metadata = answer.get("ResponseMetadata")
        status = metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None
    elif answer is None and isinstance(err, OSError):
        status = getattr(err, "code", None)
    else:
        status = getattr(answer, "status_code", None)
    return status if isinstance(status, int) else None


def _owner_of(file: str) -> Literal["user", "dlac", ""]:
    """Return the owner of a source file. Empty: a library, or the machinery that starts the script."""
    if file.startswith("<frozen"):
        return ""
    path = os.path.realpath(file)
    if path.startswith(_DLAC_FOLDER):
        return "dlac"
    return "" if path.startswith(_library_folders()) or _SITE.search(path) else "user"


_DLAC_FOLDER = os.path.join(os.path.realpath(Path(__file__).parents[2]), "")
_SITE = re.compile(r"[/\\](site|dist)-packages[/\\]")


@cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {path for name in names if (path := sysconfig.get_path(name))}
    return tuple(os.path.join(os.path.realpath(path), "") for path in found)


def _format_users_frames(err: BaseException) -> str:
    """Return the traceback with the frames of the user's code and the innermost one of each exception."""
    try:
        found = traceback.TracebackException.from_exception(err, compact=True)
        for each in _chain_of(found):
            own = [frame for frame in each.stack[:-1] if _owner_of(frame.filename) == "user"]
            each.stack = traceback.StackSummary.from_list([*own, *each.stack[-1:]])
        shown = mask_secrets("".join(found.format()).rstrip())  # a secret that is cut in two is not found
    except Exception:  # whatever a script's own exception class does, the record of its kind is kept
        return ""
    return shown if len(shown) <= _TRACEBACK_CHARACTERS else "...\n" + shown[-_TRACEBACK_CHARACTERS:]
