"""torchdata's StatefulDataLoader over pyarrow, as a careful user writes it.

Row groups are dealt to workers. The state has the files, so that a resume reads the files of the run's start, the position
in the worker's own row groups, and the rest of a packed sequence.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks.peer_loaders.rows import COLUMNS, arrays
from benchmarks.peer_loaders.stateful import StatefulLoader
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job

PACKAGES = ["torchdata", "torch", "pyarrow"]
SHARED_STATE = False
NOT_OFFERED: dict[str, str] = {}
NOTES = [
    "user code: row groups dealt to ranks and workers; the state holds files, row group, row and remainder",
    "StatefulDataLoader has no change of world size: rank r of the new world is given the state of rank r mod W",
]


class RowGroups(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of one worker's row groups."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._at: dict[str, Any] = {"files": job.files, "epoch": 0, "unit": 0, "row": 0, "rest": np.empty(0, np.int32)}

    def set_epoch(self, epoch: int) -> None:
        """Begin pass `epoch`."""
        self._at |= {"epoch": epoch, "unit": 0, "row": 0, "rest": np.empty(0, np.int32)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch."""
        return dict(self._at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self._at = dict(state)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self._sequences() if self._job.packed else self._rows()

    def _rows(self) -> Iterator[dict[str, torch.Tensor]]:
        wanted = self._job.rank_batch
        parts: list[tuple[Any, Any]] = []
        for row_ids, tokens in self._groups():
            while self._at["row"] < len(row_ids):
                begin = self._at["row"]
                taken = slice(begin, begin + wanted - sum(len(part[0]) for part in parts))
                parts.append((row_ids[taken], tokens[taken]))
                self._at["row"] = min(taken.stop, len(row_ids))
                if sum(len(part[0]) for part in parts) == wanted:
                    yield _batch(parts)
                    parts = []
        if parts:
            yield _batch(parts)

    def _sequences(self) -> Iterator[dict[str, torch.Tensor]]:
        length = self._job.sequence * self._job.rank_batch
        for _, documents in self._groups():
            self._at["rest"] = np.concatenate([self._at["rest"], *documents[self._at["row"] :]])
            self._at["row"] = len(documents)
            while len(self._at["rest"]) >= length:
                batch, self._at["rest"] = self._at["rest"][:length], self._at["rest"][length:]
                yield {"tokens": torch.from_numpy(batch.reshape(-1, self._job.sequence).copy())}
        if len(self._at["rest"]):
            padded = np.full(-len(self._at["rest"]) // self._job.sequence * -self._job.sequence, -1, np.int32)
            padded[: len(self._at["rest"])] = self._at["rest"]
            self._at["rest"] = self._at["rest"][:0]
            yield {"tokens": torch.from_numpy(padded.reshape(-1, self._job.sequence))}

    def _groups(self) -> Iterator[tuple[Any, Any]]:
        worker = get_worker_info()
        count, index = (worker.num_workers, worker.id) if worker else (1, 0)
        units = self._units()[self._job.rank * count + index :: self._job.world_size * count]
        while self._at["unit"] < len(units):
            yield self._read(*units[self._at["unit"]])
            self._at |= {"unit": self._at["unit"] + 1, "row": 0}

    def _units(self) -> list[tuple[str, int]]:
        units = [(file, group) for file in self._at["files"] for group in range(pq.ParquetFile(file).num_row_groups)]
        return [units[index] for index in self._order("units", len(units))]

    def _order(self, salt: str, count: int) -> Any:
        if not self._job.shuffle:
            return np.arange(count)
        seed = [self._job.seed, self._at["epoch"], *salt.encode()]
        return np.random.default_rng(seed).permutation(count)

    def _read(self, file: str, group: int) -> tuple[Any, Any]:
        table = pq.ParquetFile(file).read_row_group(group, columns=COLUMNS)
        if self._job.packed:
            return arrays(table)[0], arrays(table)[2]
        row_ids, kinds = table["row_id"].to_numpy(), table["kind"].to_numpy()
        order = self._order(f"{file}{group}", len(row_ids))
        if self._job.filtered:
            order = order[kinds[order] < KINDS // 2]
        tokens = table["tokens"].combine_chunks().flatten().to_numpy().reshape(len(row_ids), -1)
        return row_ids[order], tokens[order]


def _batch(parts: list[tuple[Any, Any]]) -> dict[str, torch.Tensor]:
    row_ids, tokens = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    return {"row_id": torch.from_numpy(row_ids), "tokens": torch.from_numpy(tokens)}


def open_loader(job: Job, state: bytes | None) -> StatefulLoader:
    """Return a loader over the job's files."""
    dataset = RowGroups(job)
    return StatefulLoader(dataset, job, state, batch_size=None, set_epoch=dataset.set_epoch)
