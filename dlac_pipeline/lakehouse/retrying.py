"""The one policy by which commits and storage requests are repeated: until they are answered, or for too long."""

import errno
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import tenacity

from dlac_pipeline.lakehouse.errors import CatalogUnreachable, CommitConflict

RETRY_WITHIN_S = 180.0
"""Seconds for which a recovery retries an unavailable catalog or store. Then it ends, and can be requested again."""
_FINAL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR})
_REFUSED = re.compile(
    "ACCESS_DENIED|NO_SUCH_BUCKET|NoSuchBucket|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|Bucket does not exist"
)
"""Messages of object stores for such failures, without a number."""
_STORES = ("AWS Error", "google::cloud", "curlCode", "Azure")
"""Words that mark messages of object stores: pyarrow's own messages, about damaged files, have no number either."""
_random = random.SystemRandom()
"""A generator apart from training's, which a checkpoint restores. Forked ranks must not retry in lock-step."""


def retrying(
    deadline_s: float = 60.0,
    *,
    of: type[Exception] | tuple[type[Exception], ...] = (CommitConflict, CatalogUnreachable),
    stop: threading.Event | None = None,
) -> tenacity.Retrying:
    """Repeat a lost or unanswered call, at random growing intervals, until the deadline or once `stop` is set."""
    stop = stop or threading.Event()
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(of),
        wait=partial(pause_s, longest_s=min(5.0, deadline_s / 12)),
        stop=tenacity.stop_any(tenacity.stop_after_delay(deadline_s), tenacity.stop_when_event_set(stop)),
        sleep=tenacity.sleep_using_event(stop),
        reraise=True,
    )


def is_final(err: OSError) -> bool:
    """Return True if waiting does not help against this failure of a file system or an object store."""
    return err.errno in _FINAL or bool(_REFUSED.search(str(err)))


def may_pass(err: OSError) -> bool:
    """Return True if a file system or an object store may answer later. A file that cannot be decoded does not change."""
    return not is_final(err) and (err.errno is not None or any(each in str(err) for each in _STORES))


def rereading() -> tenacity.Retrying:
    """Repeat a read of a table whose files commits or upkeep removed between the look at its metadata and their reading."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(FileNotFoundError), stop=tenacity.stop_after_attempt(5), reraise=True
    )


@contextmanager
def as_commit_conflict() -> Iterator[None]:
    """Turn a file that upkeep removed while a commit was built into a `CommitConflict`: the table has long moved on."""
    try:
        yield
    except FileNotFoundError as err:
        raise CommitConflict(f"a commit was overtaken by others and by upkeep, and did not land: {err}") from err


def pause_s(state: tenacity.RetryCallState, *, longest_s: float) -> float:
    """Return a random pause that grows with the number of tries."""
    return _random.uniform(0, min(longest_s, 0.05 * 2.0**state.attempt_number))
