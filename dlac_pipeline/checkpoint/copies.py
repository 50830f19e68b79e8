"""The copies before the store: the newest stay on this machine for a quick restart, the others make room."""

from __future__ import annotations

import logging
import shutil
from collections import deque
from pathlib import Path

from dlac_pipeline.checkpoint.store import Tiers

_log = logging.getLogger(__name__)


class LocalCopies:
    """The copies on one machine; `evicts` for one of its ranks, and never where the local folder is the store itself."""

    def __init__(self, tiers: Tiers, *, keep: int, evicts: bool, resumed_from: str | None) -> None:
        """`resumed_from` is the name of the checkpoint that this attempt has loaded, or will."""
        self._run_folder = tiers.local / tiers.run
        self._evicts = evicts and tiers.store is not None
        self._kept: deque[str] = deque([] if resumed_from is None else [resumed_from], maxlen=keep)

    def committed(self, name: str) -> None:
        """The checkpoint `name` has its copy in the store: remove the local copies that are older than what is kept.

        What is staged already for the next one is newer, and stays.
        """
        self._kept.append(name)
        if self._evicts:
            for folder in self._older(name):
                _removed(folder)

    def _older(self, name: str) -> list[Path]:
        names = {f"{folder.parent.name}/{folder.name}": folder for folder in self._run_folder.glob("attempt-*/step-*")}
        return [folder for each, folder in names.items() if each < name and each not in self._kept]


def _removed(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as err:
        _log.warning("expected to remove the local copy %s, found %s; the next checkpoint tries again", folder, err)
