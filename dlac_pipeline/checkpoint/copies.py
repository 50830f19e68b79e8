"""The copies before the store: the newest stay on this machine for a quick restart, the others make room."""

from __future__ import annotations

import logging
import shutil
from collections import deque
from pathlib import Path

from catalog.errors import StoreUnavailable
from dlac_pipeline.checkpoint.conversion import discard_conversion
from dlac_pipeline.checkpoint.store import MANIFEST, Tiers

_log = logging.getLogger(__name__)


class LocalCopies:
    """The copies on one machine; `evicts` for one of its ranks, and never where the local folder is the store itself."""

    def __init__(self, tiers: Tiers, *, keep: int, evicts: bool, resumed_from: str | None) -> None:
        """`resumed_from` is the name of the checkpoint that this attempt has loaded, or will."""
        self._tiers = tiers
        self._evicts = evicts and tiers.store is not None
        self._kept: deque[str] = deque([] if resumed_from is None else [resumed_from], maxlen=keep)
        self._copied: set[str] = set()

    def committed(self, name: str) -> None:
        """The checkpoint `name` has its copy in the store: remove the local copies that are older than what is kept.

        What is staged already for the next one is newer, and stays.
        """
        self._kept.append(name)
        self._copied.add(name)
        if self._evicts:
            for each, folder in self._older(name):
                if self._is_copy(each, folder):
                    self._copied.discard(each)
                    _removed(folder)

    def _older(self, name: str) -> list[tuple[str, Path]]:
        folders = sorted((self._tiers.local / self._tiers.run).glob("attempt-*/step-*"))
        names = [(f"{folder.parent.name}/{folder.name}", folder) for folder in folders]
        return [(each, folder) for each, folder in names if each < name and each not in self._kept]

    def _is_copy(self, name: str, folder: Path) -> bool:
        """Whether the store has it as well, or nobody: from before there was another store, this may be all there is."""
        copy = self._tiers.copy_of(name)
        if name in self._copied or copy is None or not (folder / MANIFEST).exists():
            return True
        try:
            return MANIFEST in self._tiers.files.children(copy)
        except StoreUnavailable:
            return False


def _removed(folder: Path) -> None:
    try:
        discard_conversion(folder)
        shutil.rmtree(folder)
    except OSError as err:
        _log.warning("expected to remove the local copy %s, found %s; the next checkpoint tries again", folder, err)
