"""Batches of a rank as an `IterableDataset` with a position, and a `DataLoader` that reports received batches."""

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.extensions.dataset import state as states
from dlac_pipeline.extensions.dataset.batches import ABOUT, DictBatch, LastBatch, as_dict, copy_batch, make_empty
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.slots import DataCoordinate, groups_of_slots
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.batch import Batch, drop_empty_slots
from dlac_pipeline.read.device import Device, DeviceCopies
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.read.reader import BatchReader, Exchange, Sums, alone, summing_over
from dlac_pipeline.spec.job_spec import JobSpec

# A worker that frees garbage of the process that forked it can crash: a connection to DuckDB waits for threads that it has not.
os.register_at_fork(after_in_child=gc.freeze)


class DlacDataset(IterableDataset[DictBatch]):
    """Batches of a rank from its position to the end of the last pass. Each iteration resumes at the consumer's position.

    With k workers of a `DataLoader(dataset, batch_size=None)`, worker w reads batches w, w+k, w+2k, ..., which the DataLoader
    puts in order again. It decodes the row groups of skipped batches, too (streamed: it tokenizes their documents).
    The dataset itself decodes in `read.threads` threads, so 0 or 1 workers are the fastest.

    For a streamed leg (packing, a transform) all ranks have to agree on its end. They do under torch.distributed, iterated
    without workers or through `loader()`. Otherwise each rank ends when its key groups end, and a batch's `rows` and `tokens`
    count this rank alone (`readers` 1).
    """

    def __init__(
        self,
        spec: JobSpec,
        leg: Leg,
        *,
        coordinate: DataCoordinate,
        group: dist.ProcessGroup | None = None,
        last_batch: LastBatch = "partial",
        plans: Plans | None = None,
    ) -> None:
        """Made by `open_dataset`. `plans` are plans that this process has made."""
        self.spec = spec
        self.leg = leg
        self.coordinate = coordinate
        """Share of the rows that this rank reads."""
        self.last_batch = last_batch
        self._group = group
        self._shares_end = group is not None
        """True if other ranks of torch.distributed read the same dataset. Spawned workers know it, and have no group."""
        self._agreeing = False
        """True while a loader starts its workers, if all ranks agree on the end."""
        self._step = leg.start_step
        self._cursors = states.start_of(leg, self.key_groups)
        self._base: int | None = None
        """The step after which the workers of a DataLoader began to take turns."""
        self._iteration = 0
        self._begun_in: int | None = None
        """The process in which an iteration was begun and has not ended."""
        self._opened: tuple[int, OpenLeg] | None = None
        self._plans = None if plans is None else (os.getpid(), plans)

    @property
    def step(self) -> int:
        """The step of the last batch that the consumer was given."""
        return self._step

    @property
    def key_groups(self) -> range:
        """The key groups that this rank reads."""
        size = self.leg.batch_size
        return groups_of_slots(self.coordinate.slots(size), size // self.leg.key_groups)

    def __len__(self) -> int:
        """Return the batches of the whole leg, all passes. Raises TypeError where only reading can show it."""
        order = self._open().order
        steps = order.total_steps
        if self._streamed or steps is None:
            raise TypeError("how many batches a streamed dataset has is known by reading it only")
        first = self.leg.start_step + 1
        last = order.last_full_step if self.last_batch == "drop" else steps
        return (steps if last is None else last) + 1 - first

    def __iter__(self) -> Iterator[DictBatch]:
        """Yield the batches after the position. Raises `DataFileUnreadable` if a row group is missing or does not decode."""
        self._iteration += 1
        return self._batches(self._iteration)

    def state_dict(self) -> states.State:
        """Return the consumer's position as JSON data of a few KB. Call it between the step of the last batch and the next batch.

        For a streamed dataset of several ranks it is this rank's part: `gathered_state` or `merge_states` combine the parts.
        """
        worker = get_worker_info()
        part: dict[str, Any] | None = None
        if worker is not None:  # a part of the state of a StatefulDataLoader, which puts it back into the same worker
            part = {"base": self._step if self._base is None else self._base, "of": worker.num_workers}
        return states.make_state(
            self.leg,
            step=self._step,
            cursors=self._cursors if self._streamed else None,
            last_batch=self.last_batch,
            worker=part,
        )

    def gathered_state(self) -> states.State:
        """Return the state with the parts of all ranks. All of them call it at the same step."""
        if self._group is None or not self._streamed:
            return self.state_dict()
        tree = RankTree(self.coordinate.index, self.coordinate.count, self._group)
        parts = tree.gather(json.dumps(self.state_dict()).encode())
        gathered = tree.broadcast(None if parts is None else b"[" + b",".join(parts) + b"]")
        return states.merge_states(json.loads(gathered))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a state: a counted one of any rank, or a streamed one of this rank or merged.

        Then iterate again.

        The state names the snapshot, unless the spec does.

        Raises:
            ResumeMismatch: the state was read with other settings, of another table, or lacks key groups of this rank.
            TableReplaced, PinLost: the table was created again, or its snapshot is gone.
        """
        state = states.read_state(state)
        states.check_last_batch(state, self.last_batch)
        leg = Leg.from_json(state["leg"]["json"])
        if leg != self.leg:
            states.check_requested(self.spec, leg)
            self.leg, self._opened = leg, None
        states.check_position(state, self._open().order)
        self._cursors = states.cursors_of(state, leg, self.key_groups)
        self._step, self._base = state["step"], states.base_of(state)
        self._begun_in = None
        self._iteration += 1

    def observe(self, batch: DictBatch) -> None:
        """Note that the consumer received this batch or is done with it: the position is directly after it."""
        about = batch[ABOUT]
        self._step = int(about["step"])
        if self._streamed:
            self._cursors = dict(zip(self.key_groups, about["cursors"].tolist(), strict=True))

    def loader(
        self,
        *,
        inputs: Callable[[DictBatch], Any] | None = None,
        device: Device | None = None,
        pin_memory: bool | None = None,
        **options: Any,
    ) -> "DlacLoader":
        """Return a `DataLoader` over this dataset through which `state_dict()` knows the last batch that the consumer received.

        `inputs` turns a batch into the model's inputs, in the workers if they exist. The loader then yields that. `device` is
        where batches are copied to, on a stream of their own. `pin_memory` puts them into page-locked memory, by default if
        they go to an accelerator. Without an accelerator both change nothing. `options` are further arguments of DataLoader:
        num_workers, prefetch_factor, persistent_workers, multiprocessing_context, ...

        Raises `SpecInvalid` if the device is not on this node.
        """
        return DlacLoader(self, inputs, device=device, pin_memory=pin_memory, options=options)

    def with_global_counts(self, batches: Iterator[DictBatch]) -> Iterator[DictBatch]:
        """Batches of this rank alone, with `rows` and `tokens` of all ranks, and empty ones until all have ended."""
        upcoming = self._ahead(batches, None)
        while True:
            batch, sums = upcoming
            rows, tokens = sums()
            if not rows or self._is_dropped(rows, self.leg.batch_size):
                return
            upcoming = self._ahead(batches, batch)
            yield {**batch, ABOUT: {**batch[ABOUT], "rows": rows, "tokens": tokens, "readers": self.coordinate.count}}

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Let workers that start inside read a streamed dataset of several ranks: their consumer calls `with_global_counts`."""
        self._agreeing = True
        try:
            yield
        finally:
            self._agreeing = False

    @property
    def ends_apart(self) -> bool:
        """True if the ranks have to agree on the end, and can."""
        return self._group is not None and self._streamed

    @property
    def _streamed(self) -> bool:
        return any(self.leg.streamed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker: no open files, no process group."""
        return {**self.__dict__, "_opened": None, "_plans": None, "_group": None}

    def _ahead(self, batches: Iterator[DictBatch], last: DictBatch | None) -> tuple[DictBatch, Sums]:
        padded = self.last_batch == "pad"
        batch = next(batches, None) or (self._nothing() if last is None else make_empty(last, padded=padded))
        return batch, summing_over(self._group)([batch[ABOUT]["rows"], batch[ABOUT]["tokens"]])

    def _nothing(self) -> DictBatch:
        """Return an empty batch, where this rank had ended before the position, without tensors where all ranks have."""
        reader = self._reader(exchange=lambda counts: alone([1, 1]))
        batch: DictBatch
        try:
            batch = next((as_dict(self._shaped(each)) for each in reader), {ABOUT: {}})
        finally:
            reader.close()
        return {**batch, ABOUT: {**batch[ABOUT], "rows": 0, "tokens": 0}}

    def _open(self) -> OpenLeg:
        """The leg, opened by this process: a forked worker shares no connection with its parent."""
        if self._opened is None or self._opened[0] != os.getpid():
            own = self._plans is not None and self._plans[0] == os.getpid()
            plans = (
                self._plans[1]
                if own and self._plans
                else Plans(connect(self.spec.lakehouse, tables=self.spec.own_tables))
            )
            self._opened = os.getpid(), open_leg(plans, self.leg, self.spec)
        return self._opened[1]

    def _batches(self, iteration: int) -> Iterator[DictBatch]:
        worker = get_worker_info()
        if worker is not None and self._begun_in == os.getpid():
            raise SpecInvalid(
                "expected one iteration of a DataLoader with persistent workers, found another one begun after it was left: "
                "its workers had read ahead; iterate dataset.loader() instead"
            )
        if worker is not None and self._streamed and self._shares_end and not self._agreeing:
            raise SpecInvalid(
                f"expected a packed or transformed dataset on {self.coordinate.count} ranks to be read through "
                "dataset.loader(), or with num_workers=0, found a worker of another DataLoader: its ranks end at different "
                "batches, and the others would wait without an end"
            )
        self._begun_in = os.getpid()
        reader = self._reader(
            exchange=summing_over(self._group) if self.ends_apart and worker is None else alone,
            budget_shares=1 if worker is None else worker.num_workers,
        )
        counts_all = not self._streamed or (self.ends_apart and worker is None)
        full_rows = self.leg.batch_size if counts_all else self.leg.batch_size // self.coordinate.count
        try:
            for batch in self._turns(reader):
                if iteration != self._iteration:
                    raise SpecInvalid("expected one iteration of a dataset at a time, found that a later one was begun")
                if self._is_dropped(batch.rows, full_rows):
                    break
                given = as_dict(self._shaped(batch))
                self.observe(given)
                yield given
            self._begun_in = None
        finally:
            reader.close()

    def _is_dropped(self, rows: int, full_rows: int) -> bool:
        """Return True if a batch with so many samples is not delivered. Then no later batch is full."""
        return self.last_batch == "drop" and rows < full_rows

    def _shaped(self, batch: Batch) -> Batch:
        is_full = batch.rows == self.leg.batch_size
        return batch if is_full or self.last_batch == "pad" else drop_empty_slots(batch)

    def _turns(self, reader: BatchReader) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is None and (self.ends_apart or self.coordinate.count == 1 or not self._streamed):
            return iter(reader)
        turn, workers = 0, 1
        if worker is not None:
            self._base = self._step if self._base is None else self._base
            workers = worker.num_workers
            turn = (worker.id - self._step + self._base) % workers
        batches = reader.every(workers, turn)
        return (replace(batch, readers=1) for batch in batches) if self._streamed else batches

    def _reader(self, *, exchange: Exchange, budget_shares: int = 1) -> BatchReader:
        opened = self._open()
        state = opened.start_state() if self._streamed else None
        if state is not None:  # the cursors of other ranks' key groups are not used
            for group, cursors in self._cursors.items():
                for source, cursor in enumerate(cursors):
                    state[source][group] = Cursor(*cursor)
        return opened.reader(
            coordinate=self.coordinate,
            step=self._step,
            state=state,
            exchange=exchange,
            budget_bytes=self.spec.read.budget_mb * 2**20 // budget_shares,
        )


class DlacLoader(DataLoader[DictBatch]):
    """A `DataLoader` of whole batches that reports to its dataset which batch the consumer received.

    A second iteration resumes at the consumer's position, with new workers. Accelerate's `prepare` leaves it unchanged: ranks
    have their shares already, and nothing may be read ahead of the consumer. Batches are on `device`, or in host memory
    without one.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: DlacDataset,
        inputs: Callable[[DictBatch], Any] | None,
        *,
        device: Device | None,
        pin_memory: bool | None,
        options: Mapping[str, Any],
    ) -> None:
        self._copies = DeviceCopies(device, pin_memory=pin_memory)
        # If ranks end at different batches, the empty batches are made here, and so must be their conversion.
        self._late = inputs if dataset.ends_apart else None
        early = None if dataset.ends_apart else inputs
        self._source, self._unwraps = dataset, early is not None
        # DataLoader pins in a thread of its own where it has workers.
        collate = partial(_collate, early)
        super().__init__(dataset, batch_size=None, collate_fn=collate, pin_memory=self._copies.pins, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names its own private iterator
        self._iterator = None  # persistent workers of an iteration that was left have read ahead
        with self._source.agreeing():
            batches: Iterator[DictBatch] = super().__iter__()
        if self.num_workers and self._source.ends_apart:
            batches = self._source.with_global_counts(batches)
        for batch in batches:
            self._source.observe(batch)
            if self._unwraps:
                yield self._copies.copy(batch["inputs"])
            elif self._late is not None:
                yield self._copies.copy(self._late(batch))
            else:
                yield copy_batch(batch, self._copies)

    def state_dict(self) -> states.State:
        """Return the consumer's position as `DlacDataset.gathered_state` does, equal on all ranks. Collective if streamed."""
        return self._source.gathered_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a state, as `DlacDataset.load_state_dict` does. Raises as that."""
        self._source.load_state_dict(state)


def _collate(make: Callable[[DictBatch], Any] | None, batch: DictBatch) -> DictBatch:
    """Return the batch itself, or the result of the user's function beside the batch's facts."""
    return batch if make is None else {"inputs": make(batch), ABOUT: batch[ABOUT]}
