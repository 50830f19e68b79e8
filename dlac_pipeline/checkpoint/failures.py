"""Failures of one rank, shared with all ranks, so that none waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgpack

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.errors import CheckpointError, DlacError

Named = tuple[str, str]
"""Class of an error of ours, and its message."""


def name_failure(err: Exception, *, doing: str) -> Named:
    """Return a failure as a message. `doing` names the work that a foreign error ended."""
    if isinstance(err, DlacError):
        return errors.error_kind(err), str(err)
    return CheckpointError.__name__, f"{doing} failed with {type(err).__name__}: {err}"


def failure_named(named: Named) -> DlacError:
    """Return the failure of a message."""
    kind, message = named
    return errors.error_from_kind(kind, message, default=CheckpointError)


@contextmanager
def failing_together(tree: RankTree, *, doing: str) -> Iterator[None]:
    """Raise the failure of any rank at all ranks, once all are done. Collective.

    Raises:
        DlacError: that of the lowest rank that failed.
    """
    failure = b""
    try:
        yield
    except Exception as err:
        failure = msgpack.packb(name_failure(err, doing=doing))
    if first := tree.broadcast(tree.lowest(failure)):
        raise failure_named(msgpack.unpackb(first))
