"""One rank's batches as an `IterableDataset` with a position."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from catalog.connect import connect
from catalog.errors import SpecInvalid
from dlac_pipeline.dataset.batches import ABOUT, DictBatch, as_dict, emptied
from dlac_pipeline.dataset.state import (
    STATE_VERSION,
    State,
    base_of,
    check_asked,
    cursors_of,
    digest_of,
    merge_states,
    read_state,
    start_of,
)
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.exchange import summing_over
from dlac_pipeline.read.open import OpenLeg, open_leg
from dlac_pipeline.read.reader import Counts, Exchange, RankReader, alone, groups_of_slots
from dlac_pipeline.spec import (
    JobSpec,
)

if TYPE_CHECKING:
    from dlac_pipeline.dataset.loader import DlacLoader


class DlacDataset(IterableDataset[DictBatch]):
    """One rank's batches from its position to the end of the last pass; each iteration goes on where the consumer stands.

    With k workers of a `DataLoader(dataset, batch_size=None)`, worker w reads batches w, w+k, w+2k, ..., which the DataLoader
    puts in order again. It passes over the others, but has to decode their row groups (streamed: tokenize their documents) all
    the same: the dataset itself decodes in `read.threads` threads, so 0 or 1 workers are the fastest.

    Of a streamed leg (packing, a transform) all ranks have to agree on its end. They do under torch.distributed, iterated
    without workers or through `loader()`. Otherwise each rank ends with its own key groups, and a batch's `rows` and `tokens`
    are those on this rank, as if it were the only one (`world_size` 1).
    """

    def __init__(
        self, spec: JobSpec, leg: Leg, *, rank: int, world_size: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Made by `open_dataset`."""
        self.spec = spec
        self.leg = leg
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._step = leg.start_step
        self._cursors = start_of(leg, self.key_groups)
        self._base: int | None = None
        """The step behind which the workers of a DataLoader began to take turns."""
        self._iteration = 0
        self._begun_in: int | None = None
        """The process in which an iteration was begun and has not ended."""
        self._opened: tuple[int, OpenLeg] | None = None

    @property
    def step(self) -> int:
        """The step of the last batch that the consumer was given."""
        return self._step

    @property
    def key_groups(self) -> range:
        """The key groups that this rank reads."""
        slots, per_group = self.leg.batch_size // self.world_size, self.leg.batch_size // self.leg.key_groups
        return groups_of_slots(self.rank * slots, (self.rank + 1) * slots, per_group)

    def __len__(self) -> int:
        """Batches of the whole leg, all passes; a TypeError where only reading tells."""
        steps = self._open().order.total_steps
        if self._streamed or steps is None:
            raise TypeError("how many batches a streamed dataset has is known by reading it only")
        return steps - self.leg.start_step

    def __iter__(self) -> Iterator[DictBatch]:
        """The batches behind the position.

        Raises:
            DataFileUnreadable: a row group is missing or does not decode.
        """
        self._iteration += 1
        return self._batches(self._iteration)

    def state_dict(self) -> State:
        """Where the consumer stands: JSON data of a few KB; call it between the step of the last batch and the next batch.

        Of several ranks' streamed dataset it is this rank's part: `gathered_state` or `merge_states` put them together.
        """
        text = self.leg.to_json()
        state: State = {
            "format_version": STATE_VERSION,
            "leg": {"digest": digest_of(text), "json": text},
            "step": self._step,
            "cursors": {str(group): each for group, each in self._cursors.items()} if self._streamed else None,
        }
        worker = get_worker_info()
        if worker is not None:  # a part of the state of a StatefulDataLoader, which puts it back into the same worker
            state["worker"] = {"base": self._step if self._base is None else self._base, "of": worker.num_workers}
        return state

    def gathered_state(self) -> State:
        """The state with the parts of all ranks; all of them call it at the same step."""
        if self._group is None or not self._streamed:
            return self.state_dict()
        states: list[Any] = [None] * self.world_size
        dist.all_gather_object(states, self.state_dict(), group=self._group)
        return merge_states(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state stands: a counted one of any rank, a streamed one of this rank or merged; then iterate anew.

        The snapshot is that of the state, unless the spec names one.

        Raises:
            ResumeMismatch: the state was read with other settings, of another table, or lacks key groups of this rank.
            TableReplaced, PinLost: the table was made anew, or its snapshot is gone.
        """
        state = read_state(state)
        leg = Leg.from_json(state["leg"]["json"])
        if leg != self.leg:
            check_asked(self.spec, leg)
            self.leg, self._opened = leg, None
        self._cursors = cursors_of(state, leg, self.key_groups)
        self._step, self._base = state["step"], base_of(state)
        self._begun_in = None
        self._iteration += 1
        self._open()

    def observe(self, batch: DictBatch) -> None:
        """The consumer is done with this batch, or was given it: the position is right behind it."""
        about = batch[ABOUT]
        self._step = int(about["step"])
        self._cursors = dict(zip(self.key_groups, about["cursors"].tolist(), strict=True))

    def loader(self, *, inputs: Callable[[DictBatch], Any] | None = None, **options: Any) -> DlacLoader:
        """A `DataLoader` over this dataset through which `state_dict()` knows what the consumer was given.

        `inputs` makes of a batch what the model takes, in the workers if there are any; the loader then yields that. `options`
        are those of DataLoader: num_workers, pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, ...
        """
        from dlac_pipeline.dataset.loader import DlacLoader

        return DlacLoader(self, inputs, options)

    def agreed(self, batches: Iterator[DictBatch]) -> Iterator[DictBatch]:
        """Batches of this rank alone, with `rows` and `tokens` of all ranks, and empty ones until all have ended."""
        upcoming = self._ahead(batches, None)
        while True:
            batch, counts = upcoming
            rows, tokens = counts.wait()
            if not rows:
                return
            upcoming = self._ahead(batches, batch)
            yield {**batch, ABOUT: {**batch[ABOUT], "rows": rows, "tokens": tokens, "world_size": self.world_size}}

    @property
    def ends_apart(self) -> bool:
        """Whether the ranks have to agree on the end, and can."""
        return self._group is not None and self._streamed

    @property
    def _streamed(self) -> bool:
        return any(self.leg.streamed)

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned worker gets: no open files, no process group."""
        return {**self.__dict__, "_opened": None, "_group": None}

    def _ahead(self, batches: Iterator[DictBatch], last: DictBatch | None) -> tuple[DictBatch, Counts]:
        batch = next(batches, None) or (self._nothing() if last is None else emptied(last))
        return batch, summing_over(self._group)([batch[ABOUT]["rows"], batch[ABOUT]["tokens"]])

    def _nothing(self) -> DictBatch:
        """An empty batch, where this rank had ended before the position; without tensors where all ranks have."""
        reader = self._reader(exchange=lambda counts: alone([1, 1]))
        batch: DictBatch
        try:
            batch = next((as_dict(each) for each in reader), {ABOUT: {}})
        finally:
            reader.close()
        return {**batch, ABOUT: {**batch[ABOUT], "rows": 0, "tokens": 0}}

    def _open(self) -> OpenLeg:
        """The leg, opened by this process: a forked worker shares no connection with its parent."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open_leg(connect(self.spec.lakehouse), self.leg, self.spec)
        return self._opened[1]

    def _batches(self, iteration: int) -> Iterator[DictBatch]:
        worker = get_worker_info()
        if worker is not None and self._begun_in == os.getpid():
            raise SpecInvalid(
                "expected one iteration of a DataLoader with persistent workers, found another one begun after it was left: "
                "its workers had read ahead; iterate dataset.loader() instead"
            )
        self._begun_in = os.getpid()
        reader = self._reader(
            exchange=summing_over(self._group) if self.ends_apart and worker is None else alone,
            budget_shares=1 if worker is None else worker.num_workers,
        )
        try:
            for batch in self._turns(reader):
                if iteration != self._iteration:
                    raise SpecInvalid("expected one iteration of a dataset at a time, found that a later one was begun")
                given = as_dict(batch)
                self.observe(given)
                yield given
            self._begun_in = None
        finally:
            reader.close()

    def _turns(self, reader: RankReader) -> Iterator[Batch]:
        """The batches that this process reads."""
        worker = get_worker_info()
        if worker is None and (self.ends_apart or self.world_size == 1 or not self._streamed):
            return iter(reader)
        turn, workers = 0, 1
        if worker is not None:
            self._base = self._step if self._base is None else self._base
            workers = worker.num_workers
            turn = (worker.id - self._step + self._base) % workers
        batches = reader.every(workers, turn)
        return (replace(batch, world_size=1) for batch in batches) if self._streamed else batches

    def _reader(self, *, exchange: Exchange, budget_shares: int = 1) -> RankReader:
        opened = self._open()
        state: ReaderState | None = None
        if self._streamed:
            state = opened.start_state()  # of key groups of other ranks it is not looked at
            for group, cursors in self._cursors.items():
                for source, cursor in enumerate(cursors):
                    state[source][group] = Cursor(*cursor)
        return opened.reader(
            rank=self.rank,
            world_size=self.world_size,
            step=self._step,
            state=state,
            exchange=exchange,
            budget_bytes=self.spec.read.budget_mb * 2**20 // budget_shares,
        )
