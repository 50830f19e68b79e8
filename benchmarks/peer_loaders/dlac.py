"""DLAC's own dataset, iterated without a DataLoader: its background threads correspond to the workers of the others."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlac_pipeline.extensions.dataset import DlacDataset, open_dataset
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

PACKAGES = ["torch", "pyarrow", "pyiceberg"]
SHARED_STATE = True
NOT_OFFERED: dict[str, str] = {}
NOTES = ["open_dataset() on the Iceberg table, default order settings; `workers` are threads that decode ahead"]


class DlacLoader:
    """The dataset of one rank. Passes follow each other in one iteration."""

    def __init__(self, dataset: DlacDataset, job: Job) -> None:
        self._dataset = dataset
        self._job = job
        self._batches = iter(dataset)

    def batches(self, pass_number: int) -> Iterator[dict[str, Any]]:
        """Yield the batches up to the end of a pass. With several passes each is a whole number of batches here."""
        last = (pass_number + 1) * (self._job.rows // self._job.batch_size) if self._job.passes > 1 else 0
        if last and self._dataset.step >= last:  # resumed at the end of this pass
            return
        for batch in self._batches:
            yield batch
            if self._dataset.step == last:
                return

    def ids(self, batch: dict[str, Any]) -> Ids:
        """Return row ids of the valid samples, or tokens of the packed sequences with negative padding."""
        if self._job.packed:
            tokens: Ids = np.where(batch["document"].numpy() > 0, batch["tokens"].numpy(), -1).reshape(-1)
            return tokens
        ids: Ids = batch["row_id"].numpy()[batch["dlac"]["valid"].numpy()]
        return ids

    def state(self) -> bytes:
        """Return the state after the last batch."""
        return json.dumps(self._dataset.state_dict()).encode()

    def close(self) -> None:
        """End the background threads."""
        self._batches.close()  # type: ignore[attr-defined]  # a generator


def open_loader(job: Job, state: bytes | None) -> DlacLoader:
    """Return a loader over the job's table."""
    dataset = open_dataset(
        home=job.home,
        table=job.table,
        columns=["tokens"] if job.packed else ["row_id", "tokens"],
        row_filter=f"kind < {KINDS // 2}" if job.filtered else None,
        batch_size=job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
        passes=job.passes,
        length=job.sequence if job.packed else 0,
        threads=max(1, job.workers),
        rank=job.rank,
        world_size=job.world_size,
        state=None if state is None else json.loads(state),
    )
    return DlacLoader(dataset, job)
