"""The checkpoint that is resumed from, on every machine of an attempt: its claimer has verified it on one of them."""

from __future__ import annotations

import socket
from pathlib import Path

import msgpack

from catalog.errors import DlacError
from dlac_pipeline.checkpoint.committing import failure_named, named
from dlac_pipeline.checkpoint.restore import restore
from dlac_pipeline.checkpoint.store import Tiers, name_of
from dlac_pipeline.checkpoint.tree import RankTree
from dlac_pipeline.recover.coordinator import ResumePoint


def folder_here(point: ResumePoint, tiers: Tiers, tree: RankTree, *, restores: bool) -> Path:
    """The verified files on this machine: the claimer's own, a mounted store's, or a copy made now; collective.

    `restores` for one rank of every machine.

    Raises:
        StoreUnavailable, CheckpointDamaged: some machine has no whole copy, and gets none; on all ranks.
    """
    assert point.folder is not None, "there is a checkpoint to resume from"
    folder, failure = Path(point.folder), None
    if tiers.store is not None and point.host != socket.gethostname():
        folder = tiers.folder(name_of(point.manifest_uri))
        if restores:
            try:
                restore({"manifest_uri": point.manifest_uri, "manifest_digest": point.manifest_digest}, tiers)
            except DlacError as err:
                failure = named(err)
    votes = tree.gather(msgpack.packb(failure))
    failures = [] if votes is None else [each for each in map(msgpack.unpackb, votes) if each is not None]
    said = msgpack.unpackb(tree.broadcast(None if votes is None else msgpack.packb(failures[:1])))
    if said:
        raise failure_named(said[0])
    return folder
