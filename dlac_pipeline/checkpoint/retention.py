"""Which checkpoints of a run are kept, and the removal of the others' files.

A checkpoint is retired by a row in the very append that makes a newer one the head; only then are its files removed, and nobody
selects it any more. A removal that was interrupted goes on behind the next attempt's first checkpoint, together with what
attempts that were replaced had staged and never committed: no row names it, and none ever can.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from catalog.ledger import Row, checkpoint_rows
from dlac_pipeline.checkpoint.manifest import folder_of
from dlac_pipeline.checkpoint.store import attempt_of
from dlac_pipeline.spec import CheckpointSpec

_log = logging.getLogger(__name__)
_OUT = ("retire", "quarantine")


class Retention:
    """At the coordinator of one attempt; `rows` are the run's when the attempt began."""

    def __init__(self, settings: CheckpointSpec, run: str, attempt: int, rows: Sequence[Row]) -> None:
        self._settings = settings
        self._folder = Path(settings.store) / run
        self._attempt = attempt
        self._rows = [row for row in rows if row["kind"] in ("checkpoint", *_OUT)]
        self._swept = False

    def due(self, checkpoint_id: str, step: int, parent: str | None) -> list[str]:
        """What is to be retired when this checkpoint becomes the head: all that is not kept, oldest first."""
        keep_last = self._settings.keep_last
        if not keep_last:
            return []
        checkpoints = checkpoint_rows(self._rows)
        out = {row["checkpoint_id"] for row in self._rows if row["kind"] in _OUT}
        kept = {checkpoint_id}
        while parent is not None:
            row = checkpoints[parent]
            if parent not in out and (len(kept) < keep_last or self._is_milestone(row["step"])):
                kept.add(parent)
            parent = row["parent"]
        return [each for each in checkpoints if each not in kept | out]

    def committed(self, checkpoint: Row, retired: Iterable[str]) -> None:
        """The checkpoint is the head, and these are retired: remove their files, in a thread."""
        gone = [{"kind": "retire", "checkpoint_id": each} for each in retired]
        self._rows += [checkpoint, *gone]
        found = checkpoint_rows(self._rows)
        if self._swept:
            folders = [folder_of(found[row["checkpoint_id"]]["manifest_uri"]) for row in gone]
        else:
            folders, self._swept = self._left_over(), True
        if folders:
            threading.Thread(target=_remove, args=(folders,), name="retention", daemon=True).start()

    def _is_milestone(self, step: int) -> bool:
        every = self._settings.keep_every_steps
        return step in self._settings.keep_steps or (every > 0 and step % every == 0)

    def _left_over(self) -> list[Path]:
        """Folders of retired checkpoints, and those of earlier attempts that no checkpoint has."""
        out = {row["checkpoint_id"] for row in self._rows if row["kind"] == "retire"}
        named = {folder_of(row["manifest_uri"]): row for row in checkpoint_rows(self._rows).values()}
        found = []
        for folder in sorted(self._folder.glob("attempt-*/step-*")):
            row = named.get(folder.resolve())
            if (row is None and attempt_of(folder) < self._attempt) or (
                row is not None and row["checkpoint_id"] in out
            ):
                found.append(folder)
        return found


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as err:
            _log.warning(
                "expected to remove %s, which no run needs, found %s; the next attempt tries again", folder, err
            )
