"""Failures of one rank, told to all: none may be left waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgpack

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.errors import CheckpointError, DlacError

Named = tuple[str, str]
"""Class of an error of ours, and its message."""


def name_failure(err: Exception, *, doing: str) -> Named:
    """A failure, to be told; `doing` says what somebody else's error ended."""
    if isinstance(err, DlacError):
        return errors.error_kind(err), str(err)
    return CheckpointError.__name__, f"{doing} failed with {type(err).__name__}: {err}"


def failure_named(said: Named) -> DlacError:
    """The failure that was told."""
    kind, message = said
    return errors.error_from_kind(kind, message, default=CheckpointError)


@contextmanager
def failing_together(tree: RankTree, *, doing: str) -> Iterator[None]:
    """What fails inside at any rank fails at all, once all are through; collective.

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
