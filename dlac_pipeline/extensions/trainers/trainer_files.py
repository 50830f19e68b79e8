"""Files that a trainer writes and reads itself, as the state of a checkpoint. Their format and loading are the trainer's."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.checkpoint.stage.streamed_file import WrittenFile
from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.lakehouse.durable_io import fsync_path
from dlac_pipeline.lakehouse.errors import CheckpointDamaged
from dlac_pipeline.lakehouse.store_files import make_below

FOLDER = "trainer"
"""Folder of the trainer's files in a checkpoint's folder."""


class TrainerFiles(Engine):
    """Files of a trainer's own checkpoint.

    `save(folder)` lets the trainer save into `folder`, and is collective. It may return another folder, which the trainer has
    written and whose files are then copied. `load(folder)` lets the trainer load. Without it the script passes `folder` to the
    trainer. `modules` are checked for NaN before a checkpoint. `applied` returns False if the last step was skipped.
    """

    name = "files"
    writes_itself = True

    def __init__(
        self,
        save: Callable[[Path], Path | None],
        load: Callable[[Path], object] | None = None,
        *,
        modules: Mapping[str, Any] | None = None,
        applied: Callable[[], bool] = lambda: True,
    ) -> None:
        self._save = save
        self._load = load
        self._modules = modules or {}
        self._applied = applied
        self._tree = RankTree(0, 1, None)
        self._lists = True
        self.folder: Path | None = None
        """The trainer's files in the checkpoint that the run resumes from, verified, or None without a checkpoint."""

    def take_ranks(self, tree: RankTree, *, lists: bool) -> None:
        """Receive the ranks that share the files. `lists` is true for one rank of every node."""
        self._tree, self._lists = tree, lists

    def save(self, folder: Path, write: Write) -> None:
        """Let the trainer save, and pass on this rank's share of its files."""
        target = folder / FOLDER
        with failing_together(self._tree, doing="making the folder of the trainer's files"), storing(folder):
            make_below(folder, target)
        try:
            written = self._save(target) or target
        except OSError as err:  # no vote: other ranks wait in the trainer's own collectives, and the launcher ends them
            raise RuntimeError(f"the trainer could not save its checkpoint: {type(err).__name__}: {err}") from err
        for name in self._assigned_files(written):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for ancestor in path.relative_to(target).parents:
                fsync_path(target / ancestor)  # names of folders, which the trainer may have made
            write(path, WrittenFile(written / name))

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Note the folder, and let the trainer load from it."""
        self.folder = folder / FOLDER
        if not self.folder.is_dir():
            raise CheckpointDamaged(f"expected the trainer's files in {str(self.folder)!r}, found no such folder")
        if self._load is not None:
            self._load(self.folder)

    def modules(self) -> Mapping[str, Any]:
        """Return the modules that were named."""
        return self._modules

    def step_applied(self) -> bool:
        """Return False if the trainer skipped the last step."""
        return self._applied()

    def _assigned_files(self, folder: Path) -> list[str]:
        """Return the files that this rank passes on. Each one belongs to the first rank whose node has it. Collective."""
        tree = self._tree
        tree.gather(b"")
        tree.broadcast(b"" if tree.rank == 0 else None)  # every rank has saved
        files = folder.rglob("*") if self._lists else ()
        names = sorted(str(path.relative_to(folder)) for path in files if path.is_file())
        listings = tree.gather(json.dumps(names).encode())
        owners = None if listings is None else json.dumps(_owners(list(map(json.loads, listings)))).encode()
        found: list[list[str]] = json.loads(tree.broadcast(owners))
        return found[tree.rank]


def _owners(listings: list[list[str]]) -> list[list[str]]:
    seen: set[str] = set()
    shares = []
    for names in listings:
        shares.append([name for name in names if name not in seen])
        seen.update(names)
    return shares
