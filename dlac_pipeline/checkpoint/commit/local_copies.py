"""Local copies of checkpoints: the newest stay on this node for a quick restart. The ledger has the names of the nodes."""

import logging
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.restore.conversion import discard_conversion
from dlac_pipeline.checkpoint.store import MANIFEST, Tiers
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.ledger.typed_rows import NodeRanks
from dlac_pipeline.lakehouse.own_folders import remove_tree

_log = logging.getLogger(__name__)
NODE_NAME_VARIABLE = "DLAC_NODE_NAME"
"""Environment variable with Kubernetes' name of the node. A pod's host name differs from it."""
_SLURM_NODE_VARIABLE = "SLURMD_NODENAME"


class LocalCopies:
    """The local copies on one node. `evicts` is true for one of its ranks, and without effect in a local store."""

    def __init__(self, tiers: Tiers, *, keep: int, evicts: bool, resumed_from: str | None) -> None:
        """`resumed_from` is the name of the checkpoint that this attempt has loaded, or will."""
        self._tiers = tiers
        self._evicts = evicts and tiers.store is not None
        self._kept: deque[str] = deque([] if resumed_from is None else [resumed_from], maxlen=keep)
        self._copied: set[str] = set()

    def committed(self, name: str) -> None:
        """Remove local copies that are older than those kept, because checkpoint `name` is in the store. A newer one stays."""
        self._kept.append(name)
        self._copied.add(name)
        folders = (self._tiers.local / self._tiers.run).glob("attempt-*/step-*") if self._evicts else ()
        for folder in sorted(folders):
            each = f"{folder.parent.name}/{folder.name}"
            if each < name and each not in self._kept and self._is_copy(each, folder):
                self._copied.discard(each)
                try:
                    discard_conversion(folder)
                    remove_tree(folder)
                except OSError as err:
                    _log.warning(
                        "expected to remove the local copy %s, found %s; the next checkpoint tries again", folder, err
                    )

    def _is_copy(self, name: str, folder: Path) -> bool:
        """Return True if the store has it too. A folder from before the store was configured may be the only one."""
        copy = self._tiers.copy_of(name)
        if name in self._copied or copy is None or not (folder / MANIFEST).exists():
            return True
        try:
            return MANIFEST in self._tiers.files.children(copy)
        except StoreUnavailable:
            return False


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name by which a scheduler asks for this node, or its host name without a scheduler."""
    return environment.get(NODE_NAME_VARIABLE) or environment.get(_SLURM_NODE_VARIABLE) or socket.gethostname()


def holders_of(votes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the nodes of the ranks, those with the most bytes first. They have local copies if the store is elsewhere."""
    bytes_of: dict[str, int] = {}
    for vote in votes:
        if node := vote["node"]:
            bytes_of[node] = bytes_of.get(node, 0) + sum(entry["bytes"] for entry in vote["files"])
    return sorted(bytes_of, key=lambda node: (-bytes_of[node], node))


def nodes_of_ranks(votes: Sequence[Mapping[str, Any]]) -> list[NodeRanks]:
    """Return each node with its number of consecutive ranks, by the votes in order of ranks. Empty if no rank trained."""
    return [
        NodeRanks(node=node, ranks=len(list(same))) for node, same in groupby(vote["node"] for vote in votes) if node
    ]
