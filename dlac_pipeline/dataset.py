"""PyTorch's own interfaces: `open_dataset()` in; batches for any `DataLoader`, and a small state to resume from, out.

    dataset = open_dataset(table="src.documents", columns=["tokens"], batch_size=256)
    for batch in dataset.loader(num_workers=2):
        ...                                    # forward, backward, optimizer step
        state = dataset.state_dict()           # behind this batch, whatever the workers have read ahead

A batch is a plain dict: column -> tensor, and under "dlac" what else there is to say of it. A dict, because pin_memory, the
collators of Hugging Face and Accelerate's moves between devices all walk through dicts, and pass an unknown class by in
silence; nested, because a table may have columns of any name. `as_batch` makes a `Batch` of it.

The position is the last batch that the consumer was given: `state_dict()` belongs behind that batch's optimizer step. In the
process that reads, the dataset sees what it hands out; what comes from worker processes it sees through `loader()`, or by
`observe(batch)`. Who reads ahead in the consumer's own process (Accelerate does, by one batch) calls `observe` behind each step.

What is consumed is not recorded in the ledger: for that there is `training_run`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from pydantic import BaseModel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from catalog.connect import Lakehouse, LakehouseConfig, connect
from catalog.durable_io import write_durably
from catalog.errors import DlacError, FormatTooNew, ResumeMismatch, SpecInvalid, TrainingFailed
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.legs import asked_for, first_leg
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.open import OpenLeg, open_leg
from dlac_pipeline.read.reader import Counts, Exchange, RankReader, alone
from dlac_pipeline.spec import (
    JobSpec,
    OrderSpec,
    ReadSpec,
    SequenceSpec,
    SourceSpec,
    home_folder,
    parse_spec,
    read_spec,
)

STATE_VERSION = 1
"""Of the state; a later DLAC reads what an earlier one wrote."""
STATE_FILE = "dlac_reader.json"
"""The state beside a checkpoint; written last, so a checkpoint folder without it is not complete."""
ABOUT = "dlac"
"""The key under which a batch says what it is."""

State = dict[str, Any]
DictBatch = dict[str, Any]
_Cursors = dict[int, list[list[int]]]
"""Key group -> its cursor in each source."""


def open_dataset(
    spec: JobSpec | str | Path | None = None,
    *,
    home: str | Path | None = None,
    lakehouse: Lakehouse | LakehouseConfig | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    state: Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> DlacDataset:
    """This rank's dataset over what a job spec names, or over `table`, `columns`, `batch_size` and further settings of one.

    `batch_size` is that of the global batch; a rank's batch has batch_size / world_size samples. Rank and world size default to
    those of torch.distributed where it is initialised, then to RANK and WORLD_SIZE, then to one rank. Under torch.distributed
    every rank calls this: rank 0 plans, and tells the others. `state`, or the folder or file that holds one, opens at that
    position, on the snapshot that it names; without it the table's current snapshot is pinned and planned.

    Raises:
        SpecInvalid: a setting is unknown or wrong, or the ranks do not divide the batch size.
        ResumeMismatch: `state` was read with other settings.
        BadInput, LakehouseError: as from planning and opening.
    """
    asked = _spec_of(spec, settings, lakehouse).resolved(Path(home) if home is not None else home_folder())
    if any(source.follow != "pinned" for source in asked.sources):
        raise SpecInvalid(
            'expected sources with follow = "pinned", found "appends": only training_run goes on to new legs'
        )
    own_rank, own_world_size = _own_place()
    rank = own_rank if rank is None else rank
    world_size = own_world_size if world_size is None else world_size
    if not 0 <= rank < world_size or asked.order.batch_size % world_size:
        raise SpecInvalid(
            f"expected 0 <= rank < world_size, and a world_size that divides the batch size {asked.order.batch_size}, "
            f"found rank {rank} of {world_size}"
        )
    joined = world_size > 1 and dist.is_initialized() and (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    group = dist.new_group(backend="gloo") if joined else None
    saved = read_state(state) if state is not None else None
    leg = _planned(asked, group) if saved is None else Leg.from_json(saved["leg"]["json"])
    dataset = DlacDataset(asked, leg, rank=rank, world_size=world_size, group=group)
    if saved is not None:
        _check_asked(asked, leg)
    dataset.load_state_dict(dataset.state_dict() if saved is None else saved)
    return dataset


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
        self._cursors = _start_of(leg, self.key_groups)
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
        return range(self.rank * slots // per_group, -(-(self.rank + 1) * slots // per_group))

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
            "leg": {"digest": _digest(text), "json": text},
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
            _check_asked(self.spec, leg)
            self.leg, self._opened = leg, None
        self._cursors = _cursors_of(state, leg, self.key_groups)
        self._step, self._base = state["step"], _base_of(state)
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
        batch = next(batches, None) or (self._nothing() if last is None else _emptied(last))
        return batch, self._sum([batch[ABOUT]["rows"], batch[ABOUT]["tokens"]])

    def _nothing(self) -> DictBatch:
        """An empty batch, where this rank had ended before the position; without tensors where all ranks have."""
        reader = self._reader(exchange=lambda counts: alone([1, 1]))
        batch: DictBatch
        try:
            batch = next((_as_dict(each) for each in reader), {ABOUT: {}})
        finally:
            reader.close()
        return {**batch, ABOUT: {**batch[ABOUT], "rows": 0, "tokens": 0}}

    def _sum(self, counts: Sequence[int]) -> Counts:
        numbers = torch.tensor(counts, dtype=torch.int64)
        return _Summed(numbers, dist.all_reduce(numbers, group=self._group, async_op=True))

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
            exchange=self._sum if self.ends_apart and worker is None else alone,
            budget_shares=1 if worker is None else worker.num_workers,
        )
        try:
            for batch in self._turns(reader):
                if iteration != self._iteration:
                    raise SpecInvalid("expected one iteration of a dataset at a time, found that a later one was begun")
                given = _as_dict(batch)
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


class DlacLoader(DataLoader[DictBatch]):
    """A `DataLoader` of whole batches that tells its dataset what the consumer is given.

    Iterating it again goes on where the consumer stands, with new workers. Accelerate's `prepare` leaves it as it is: ranks are
    shared out already, and nothing may be read ahead of the consumer; moving batches to a device is left to the caller.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, dataset: DlacDataset, inputs: Callable[[DictBatch], Any] | None, options: Mapping[str, Any]
    ) -> None:
        # Where ranks end apart, empty batches are made here: what is made of them cannot be made in a worker.
        self._late = inputs if dataset.ends_apart else None
        early = None if dataset.ends_apart else inputs
        self._source, self._unwraps = dataset, early is not None
        super().__init__(dataset, batch_size=None, collate_fn=_Inputs(early), **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names its own private iterator
        self._iterator = None  # persistent workers of an iteration that was left have read ahead
        batches: Iterator[DictBatch] = super().__iter__()
        if self.num_workers and self._source.ends_apart:
            batches = self._source.agreed(batches)
        for batch in batches:
            self._source.observe(batch)
            given = batch["inputs"] if self._unwraps else batch
            yield given if self._late is None else self._late(given)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a loader collates with: the batch itself, or what the user's function makes of it beside what it is."""

    make: Callable[[DictBatch], Any] | None

    def __call__(self, batch: Any) -> DictBatch:
        return batch if self.make is None else {"inputs": self.make(batch), ABOUT: batch[ABOUT]}


@dataclass(frozen=True, slots=True)
class _Summed:
    """Numbers that are being summed over all ranks."""

    numbers: torch.Tensor
    work: Any

    def wait(self) -> Sequence[int]:
        self.work.wait()
        return [int(number) for number in self.numbers.tolist()]


def as_batch(batch: DictBatch) -> Batch:
    """The `Batch` of a dict that a dataset gave, for its `mean` and `token_mean`; what it moved is not kept."""
    about = batch[ABOUT]
    named = {name: about[name] for name in ("step", "valid", "source", "rows", "tokens", "world_size")}
    tensors = {name: tensor for name, tensor in batch.items() if name != ABOUT}
    return Batch(tensors=tensors, cursors=about["cursors"].cpu().numpy(), **named)


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state of those of all ranks at one step, which any number of ranks can load.

    Raises:
        ResumeMismatch: they are of different steps or legs, differ in a key group that ranks share, or one is missing.
    """
    read = [read_state(state) for state in states]
    first = read[0]
    found = sorted({(state["step"], state["leg"]["digest"]) for state in read})
    if len(found) > 1:
        raise ResumeMismatch(f"expected states of one step and leg, found {found!r}: merge what was saved together")
    if first["cursors"] is None:
        return first
    merged: dict[str, Any] = {}
    for state in read:
        for group, cursors in state["cursors"].items():
            if merged.setdefault(group, cursors) != cursors:
                raise ResumeMismatch(
                    f"expected one cursor of key group {group}, found {merged[group]!r} and {cursors!r}"
                )
    missing = set(map(str, range(Leg.from_json(first["leg"]["json"]).key_groups))) - set(merged)
    if missing:
        raise ResumeMismatch(
            f"expected the states of all ranks, found none with key groups {sorted(missing, key=int)!r}"
        )
    return {**first, "cursors": {group: merged[group] for group in sorted(merged, key=int)}}


def read_state(state: Mapping[str, Any] | str | Path) -> State:
    """A state, from a file or a folder that holds one, or as it is; checked for its version and digest.

    Raises:
        SpecInvalid: there is no such file.
        FormatTooNew: a newer DLAC wrote it.
        ResumeMismatch: it was altered.
    """
    found = _read_file(Path(state)) if isinstance(state, str | Path) else dict(state)
    if found.get("format_version") != STATE_VERSION:
        raise FormatTooNew(
            f"expected a dataset's state of version {STATE_VERSION}, found version {found.get('format_version')!r}: upgrade DLAC"
        )
    if _digest(found["leg"]["json"]) != found["leg"]["digest"]:
        raise ResumeMismatch("expected a state whose leg has the digest that it names, found another: it was altered")
    return found


def _read_file(path: Path) -> State:
    path = path / STATE_FILE if path.is_dir() else path
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as err:
        raise SpecInvalid(f"expected the state of a dataset at {str(path)!r}, found {err}") from err


def trainer_callback(dataset: DlacDataset) -> Any:
    """A `transformers.TrainerCallback` that keeps the dataset's state in `checkpoint-N/dlac_reader.json`, and resumes from it.

    The Trainer must read through `dataset.loader()` (override `get_train_dataloader`), with ignore_data_skip=True. The state is
    written last: a checkpoint without it was not finished, and `last_checkpoint` passes it over.
    """
    base = import_module("transformers").TrainerCallback
    return type("PositionCallback", (_PositionCallback, base), {})(dataset)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint of a Trainer that holds a dataset's state; None if there is none."""
    folders = [path.parent for path in Path(output_dir).glob(f"checkpoint-*/{STATE_FILE}")]
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))) if folders else None


class _PositionCallback:
    """What `trainer_callback` gives, without the base class."""

    def __init__(self, dataset: DlacDataset) -> None:
        self._dataset = dataset
        self._offset = 0
        """Batches before the Trainer's first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what would not be exact; go to the checkpoint's position."""
        _check_arguments(args, self._dataset)
        if state.global_step:
            saved = read_state(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            if saved["leg"]["digest"] != self._dataset.state_dict()["leg"]["digest"]:
                raise ResumeMismatch(
                    "expected the dataset on the snapshot and settings of the checkpoint, found others: open it with "
                    "open_dataset(..., state=last_checkpoint(output_dir))"
                )
            self._dataset.load_state_dict(saved)
        self._offset = self._dataset.step - state.global_step * args.gradient_accumulation_steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state beside the checkpoint that was just saved."""
        trained = self._offset + state.global_step * args.gradient_accumulation_steps
        if trained != self._dataset.step:
            raise TrainingFailed(
                f"expected the Trainer to have trained on the batches up to step {self._dataset.step}, which it was given, found "
                f"that it is at {trained}: let get_train_dataloader return dataset.loader(...)"
            )
        saved = self._dataset.gathered_state()
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE
            write_durably(path, json.dumps(saved).encode())


def _check_arguments(args: Any, dataset: DlacDataset) -> None:
    """Check those TrainingArguments with which a run could not be resumed exactly."""
    wrong = []
    if not args.ignore_data_skip:
        wrong.append("ignore_data_skip=True, for the dataset itself goes to its position")
    if args.save_total_limit == 1:
        wrong.append("save_total_limit of 2 or more, for the older checkpoint goes before the newer one is complete")
    if args.max_steps <= 0 and args.num_train_epochs != 1:
        wrong.append("num_train_epochs=1, for the passes are those of the dataset")
    if args.gradient_accumulation_steps > 1 and (
        any(dataset.leg.streamed) or len(dataset) % args.gradient_accumulation_steps
    ):
        wrong.append(
            "a number of batches that gradient_accumulation_steps divides, or the last of them are not applied"
        )
    if wrong:
        raise SpecInvalid("expected of the TrainingArguments:\n  " + "\n  ".join(wrong))


def _as_dict(batch: Batch) -> DictBatch:
    if ABOUT in batch.tensors:
        raise SpecInvalid(f"expected columns of other names than {ABOUT!r}, found it: let a transform rename it")
    names = ("step", "valid", "source", "rows", "tokens", "world_size")
    about = {name: getattr(batch, name) for name in names}
    return {**batch.tensors, ABOUT: {**about, "cursors": torch.from_numpy(batch.cursors)}}


def _emptied(batch: DictBatch) -> DictBatch:
    """The batch behind the last one of a rank: as the last, with nothing in it."""
    about = batch[ABOUT]
    empty = {
        "step": about["step"] + 1,
        "valid": torch.zeros_like(about["valid"]),
        "source": torch.full_like(about["source"], -1),
        "rows": 0,
        "tokens": 0,
    }
    tensors = {name: torch.zeros_like(tensor) for name, tensor in batch.items() if name != ABOUT}
    return {**tensors, ABOUT: {**about, **empty}}


def _spec_of(
    spec: JobSpec | str | Path | None, settings: Mapping[str, Any], lakehouse: Lakehouse | LakehouseConfig | None
) -> JobSpec:
    """The job spec that is named, or one of single settings."""
    if spec is None:
        raw: dict[str, Any] = {"run": "dataset", "launch": {"script": "-"}, **_sections(settings)}
        asked = parse_spec(raw, origin="what open_dataset() was given")
    elif settings:
        raise SpecInvalid(f"expected a job spec or single settings, found both: {sorted(settings)!r}")
    else:
        asked = spec if isinstance(spec, JobSpec) else read_spec(Path(spec))
    if lakehouse is None:
        return asked
    config = lakehouse.config if isinstance(lakehouse, Lakehouse) else lakehouse
    return asked.model_copy(update={"lakehouse": config})


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting in the section that knows it."""
    homes: dict[str, type[BaseModel]] = {
        "source": SourceSpec,
        "order": OrderSpec,
        "sequences": SequenceSpec,
        "read": ReadSpec,
    }
    found: dict[str, Any] = {"source": {}, "order": {}}
    for name, value in settings.items():
        home = next((section for section, model in homes.items() if name in model.model_fields), None)
        if home is None and name != "mixture":
            known = sorted({field for model in homes.values() for field in model.model_fields})
            raise SpecInvalid(f"expected settings of {known!r} or 'mixture', found {name!r}")
        if home is None:
            found[name] = value
        else:
            found.setdefault(home, {})[name] = value
    return found


def _own_place() -> tuple[int, int]:
    """(rank, world size) of this process."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _planned(spec: JobSpec, group: dist.ProcessGroup | None) -> Leg:
    """The leg that the spec asks for, on the snapshot that is current now; in a group rank 0 says which one that is."""
    said: list[Any] = [None]
    failed: DlacError | None = None
    if group is None or dist.get_rank() == 0:
        try:
            lakehouse = connect(spec.lakehouse)
            leg = first_leg(spec, [make_plan(lakehouse, source) for source in spec.sources])
            said = [{"leg": leg.to_json()}]
        except DlacError as err:
            failed, said = err, [{"error": str(err)}]
    if group is not None:
        dist.broadcast_object_list(said, src=0, group=group)
    if failed is not None:
        raise failed
    if "error" in said[0]:
        raise TrainingFailed(f"rank 0 could not plan the dataset: {said[0]['error']}")
    return Leg.from_json(said[0]["leg"])


def _check_asked(spec: JobSpec, leg: Leg) -> None:
    """Check that the spec asks for what the leg of a state binds; a snapshot that it does not name is that of the state."""
    lakehouse = connect(spec.lakehouse)
    uuids = {source.table: str(lakehouse.load(source.table).metadata.table_uuid) for source in spec.sources}
    saved, wanted = leg.bound(), asked_for(spec, leg, uuids).bound()
    differing = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if differing:
        lines = "\n".join(f"  {name}: saved {saved.get(name)!r}, asked for {wanted.get(name)!r}" for name in differing)
        raise ResumeMismatch(
            f"the state was read with other settings than the dataset was opened with:\n{lines}\n"
            "give the saved values again, or begin without the state"
        )


def _start_of(leg: Leg, key_groups: range) -> _Cursors:
    return {group: [list(source.start.cursors[group]) for source in leg.sources] for group in key_groups}


def _cursors_of(state: State, leg: Leg, key_groups: range) -> _Cursors:
    """The cursors of these key groups; of a counted leg the steps alone say where they are."""
    if state["cursors"] is None:
        return _start_of(leg, key_groups)
    missing = [group for group in key_groups if str(group) not in state["cursors"]]
    if missing:
        raise ResumeMismatch(
            f"expected a state with key groups {missing!r}, found those of another rank: save gathered_state(), or put the "
            "states of all ranks together with merge_states([...])"
        )
    return {group: [list(cursor) for cursor in state["cursors"][str(group)]] for group in key_groups}


def _base_of(state: State) -> int | None:
    """Behind which step the workers took turns, where the state is that of one of them."""
    part, worker = state.get("worker"), get_worker_info()
    if part is None:
        return None
    if worker is None or worker.num_workers != part["of"]:
        raise ResumeMismatch(
            f"expected to load the state of one of {part['of']} workers into such a worker, found "
            f"{'none' if worker is None else f'{worker.num_workers} workers'}: load it through its StatefulDataLoader"
        )
    return int(part["base"])


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest(length=12)
