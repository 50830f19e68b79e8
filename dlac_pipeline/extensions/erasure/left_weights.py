"""Weights that the attempts of a run left in the memory of this node, and in folders of checkpoints that were not committed."""

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dlac_pipeline.checkpoint.commit.retention import Retention
from dlac_pipeline.checkpoint.restore.conversion import discard_conversion
from dlac_pipeline.checkpoint.store import attempt_of, folder_name_of, tiers_of
from dlac_pipeline.lakehouse.errors import NoSuchJobSpec
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow, RewindRow
from dlac_pipeline.lakehouse.store_files import below
from dlac_pipeline.memory_states.states import forget_states, memory_folder
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claims import spec_of_attempt, trained_attempts


class LeftWeights:
    """Weights of the attempts of a run before it was taken back to a checkpoint without the rows."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec, affected: Collection[str]) -> None:
        """`affected` are the checkpoints of the run that have seen the rows."""
        self._rows = Ledger(lakehouse).head_rows(spec.run)
        self._spec, self._tiers = spec, tiers_of(spec)
        self._before = _first_clean_attempt(self._rows, affected)
        names = {folder_name_of(row.manifest_uri): row for row in checkpoint_rows(self._rows).values()}
        self._committed = set(names)
        self._clean = {name for name, row in names.items() if row.checkpoint_id not in affected}
        self._nonces = {row.nonce for row in self._rows if isinstance(row, ClaimRow)}
        specs = [spec, *_earlier_specs(lakehouse, self._rows, spec.run)]
        self._memory = {folder for each in specs if (folder := memory_folder(each)) is not None}

    def find(self) -> list[str]:
        """Return the places of the weights in memory, in folders that no checkpoint names, and in local copies."""
        store, files = self._tiers.durable_run(), self._tiers.files
        attempts = [name for name in files.children(store) if self._is_before(name)]
        stored = (f"{name}/{step}" for name in attempts for step in files.children(below(store, name)))
        in_store = [below(store, name) for name in stored if self._is_mine(name) and name not in self._committed]
        memory = [str(each) for folder in self._memory for each in _children(folder) if self._is_state_before(each)]
        return sorted({*memory, *in_store, *map(str, self._local_copies())})

    def remove(self) -> None:
        """Remove the weights. Those of retired checkpoints, too."""
        Retention(self._spec.checkpoint, self._tiers, self._before, self._rows).sweep()
        for folder in self._local_copies():
            discard_conversion(folder)
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._memory:
            forget_states(folder, before=self._before)

    def _local_copies(self) -> list[Path]:
        """Return the copies on this node of a store elsewhere, except copies of clean checkpoints."""
        run = self._tiers.local / self._tiers.run
        attempts = _children(run) if self._tiers.store is not None else []
        found = {
            f"{each.name}/{step.name}": step
            for each in attempts
            if self._is_before(each.name)
            for step in _children(each)
        }
        return [step for name, step in found.items() if self._is_mine(name) and name not in self._clean]

    def _is_before(self, name: str) -> bool:
        attempt = attempt_of(name)
        return attempt is not None and attempt < self._before

    def _is_mine(self, name: str) -> bool:
        """Return True for the folder of an attempt of this run. Another lakehouse may have a run with the same name."""
        return any(f"-{nonce}" in name for nonce in self._nonces if nonce)

    def _is_state_before(self, folder: Path) -> bool:
        number = folder.name.partition("-")[0]
        return number.isdigit() and int(number) < self._before


def _first_clean_attempt(rows: Sequence[LedgerRow], affected: Collection[str]) -> int:
    """Return the attempt of the last rewind after all affected checkpoints. Without one it is the next attempt of the run."""
    seen = [row.seq for row in rows if isinstance(row, CheckpointRow) and row.checkpoint_id in affected]
    last = max(seen, default=0)
    rewinds = [row.attempt for row in rows if isinstance(row, RewindRow) and row.seq > last]
    return max(rewinds, default=fence_of_rows(rows).attempt + 1)


def _earlier_specs(lakehouse: Lakehouse, rows: Sequence[LedgerRow], run: str) -> Iterator[JobSpec]:
    """Yield the job specs of earlier launches on this node, which may have had another folder of memory."""
    for attempt in trained_attempts(rows):
        with suppress(NoSuchJobSpec):
            yield spec_of_attempt(lakehouse, rows, run, attempt)


def _children(folder: Path) -> list[Path]:
    """Return the entries of a folder. Empty if it does not exist, or is not this user's."""
    with suppress(OSError):
        return list(folder.iterdir())
    return []
