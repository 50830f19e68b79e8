"""From a leg to a rank's reader: opens tables, transforms and tokenizers, and checks them against what the leg binds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import ResumeMismatch
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table
from dlac_pipeline.plan.legs.choice import check_alike
from dlac_pipeline.plan.legs.leg import Leg, LegSequences, LegSource
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.plan import Plan, Plans
from dlac_pipeline.plan.source_order import Cursor, Stretch
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.read.documents import Documents, Samples, documents_of, samples_of
from dlac_pipeline.read.joining import take_rows
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.read.packing import Packer, Sampler
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.reader import Exchange, RankReader, alone
from dlac_pipeline.read.streams import BlockWalk, Columns, ItemStream, RowStream, SourceBlocks, Stream, size_of_columns
from dlac_pipeline.rows.columns import Column, ColumnKind, kinds_of, to_column
from dlac_pipeline.rows.tokenizing import Tokenizer, load_tokenizer
from dlac_pipeline.rows.transform import Transform, load_transform
from dlac_pipeline.spec.job_spec import JobSpec, SourceSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSource:
    """One source of a leg, ready to be decoded."""

    leg: LegSource
    decoder: BlockDecoder
    kinds: Mapping[str, ColumnKind]
    transform: Transform | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLeg:
    """A leg whose plans and tables are open. It makes readers for any rank."""

    leg: Leg
    spec: JobSpec
    order: LegOrder
    units: Mapping[str, UnitTable]
    """By plan id."""
    sources: tuple[OpenSource, ...]
    tokenizer: Tokenizer | None

    def order_apart(self) -> LegOrder:
        """Return the same order again, for another thread: an order computes its cuts on demand."""
        return self.leg.order(self.units)

    def start_state(self) -> ReaderState:
        """The reader state with which the leg begins."""
        return [list(source.start.cursors) for source in self.leg.sources]

    def reader(
        self,
        *,
        rank: int,
        world_size: int,
        step: int | None = None,
        state: ReaderState | None = None,
        exchange: Exchange = alone,
        budget_bytes: int | None = None,
    ) -> RankReader:
        """Return the reader of one rank, from after `step` (unset: the leg's beginning). A streamed leg needs `state`.

        `budget_bytes` defaults to that of the spec.

        Raises:
            SpecInvalid: the number of ranks does not divide the batch size.
        """
        step = self.leg.start_step if step is None else step
        if state is None:
            state = self.start_state() if step == self.leg.start_step else self.order.reader_state(step)
        read = self.spec.read
        budget_bytes = read.budget_mb * 2**20 if budget_bytes is None else budget_bytes
        batches = Buffers()
        prefetch = Prefetcher(
            threads=read.threads,
            budget_bytes=budget_bytes * 15 // 16,  # the rest is for what cannot be counted, as what allocators round up
            beside_bytes=lambda: batches.nbytes + sum(source.decoder.shared_bytes for source in self.sources),
        )
        openers = [self._opener(index, prefetch) for index in range(len(self.sources))]
        return RankReader(
            self.order,
            self._kinds(),
            lambda source, group, cursor: openers[source](group, cursor),
            prefetch,
            batches,
            rank=rank,
            world_size=world_size,
            step=step,
            state=state,
            exchange=exchange,
            probe=self._probe,
        )

    def _kinds(self) -> dict[str, ColumnKind]:
        """The columns that are known beforehand: not those that a transform makes."""
        length = self.leg.sequences.length
        if not length:
            kinds = {name: kind for source in self.sources for name, kind in source.kinds.items()}
            return {name: self._with_length(kind) for name, kind in kinds.items()}
        items = {"tokens": np.int64, "document": np.int32, "position": np.int32}
        return {
            name: ColumnKind(name=name, items=np.dtype(kind), listed=True, length=length)
            for name, kind in items.items()
        }

    def _with_length(self, kind: ColumnKind) -> ColumnKind:
        """Return the kind with the length of its lists: that of the first list in the plans, the same on every rank."""
        if not kind.listed or kind.ragged:
            return kind
        for source in self.sources:
            for units in (self.units[plan_id] for plan_id in source.leg.start.live_plan_ids):
                for unit in np.flatnonzero(units.live_rows).tolist():
                    length = source.decoder.list_length(units, unit, kind.name)
                    if length is not None:
                        return replace(kind, length=length)
        return replace(kind, length=0)

    def _probe(self) -> Columns:
        """Columns of some rows: for a rank that has none, what the others have."""
        if self.leg.sequences.length:
            nothing = np.zeros((0, self.leg.sequences.length), dtype=np.int64)
            return {name: Column(nothing) for name in self._kinds()}
        for index, stretch in self._first_pass():
            open_from = self.sources[index]
            table = open_from.decoder.decode(stretch.cut.units, stretch.slices)
            if not self.leg.streamed[index]:
                return _as_columns(open_from)(stretch, table)
            found = _as_samples(open_from)(stretch, table).columns
            if found:  # a transform may make nothing of all rows of a block
                return {name: Column(array) for name, array in found.items()}
        return {}

    def _first_pass(self) -> Iterator[tuple[int, Stretch]]:
        """(source, stretch) of everything in the first pass of each source, from the leg's beginning."""
        for index, source in enumerate(self.order.sources):
            for group in range(self.leg.key_groups):
                first: int | None = None
                for stretch in source.stretches(group, 0):
                    first = stretch.pass_index if first is None else first
                    if stretch.pass_index != first:
                        break
                    yield index, stretch

    def _opener(self, index: int, prefetch: Prefetcher) -> Callable[[int, Cursor], Stream]:
        source, order = self.sources[index], self.order.sources[index]
        if not self.leg.streamed[index]:
            columns = _as_columns(source)
            blocks = SourceBlocks(index, order, source.decoder, prefetch, columns, size_of_columns, portions=True)
            return lambda group, cursor: RowStream(blocks.walk(group, cursor), cursor)
        if self.leg.sequences.length:
            return self._open_packed(
                SourceBlocks(index, order, source.decoder, prefetch, self._as_documents(source), _nbytes)
            )
        samples = SourceBlocks(index, order, source.decoder, prefetch, _as_samples(source), _nbytes)
        return _open_sampled(samples)

    def _open_packed(self, blocks: SourceBlocks[Documents]) -> Callable[[int, Cursor], Stream]:
        sequences, drain = self.leg.sequences, not self.leg.following

        def open_from(group: int, cursor: Cursor) -> Stream:
            walk = blocks.walk(group, cursor)
            line = _numbered(walk)
            packer = Packer(line, length=sequences.length, start=cursor, drain=drain, pad_id=sequences.pad_id)
            return ItemStream(walk, packer)

        return open_from

    def _as_documents(self, source: OpenSource) -> Callable[[Stretch, pa.Table], Documents]:
        sequences: LegSequences = self.leg.sequences
        checks = iter([True])  # the transform's contract is checked on the first block

        def prepare(stretch: Stretch, table: pa.Table) -> Documents:
            live, positions = _live(stretch, table)
            known = source.transform is not None or sequences.column in table.column_names
            column = sequences.column if known else table.column_names[0]
            return documents_of(
                live,
                positions,
                column=column,
                transform=source.transform,
                tokenizer=self.tokenizer,
                end_id=sequences.end_id,
                begin_id=sequences.begin_id,
                reject="quarantine" if source.leg.on_reject == "quarantine" else "fail",
                check=next(checks, False),
            )

        return prepare


def open_leg(plans: Plans, leg: Leg, spec: JobSpec) -> OpenLeg:
    """Open a leg, with the places that the spec names.

    Raises:
        TableReplaced, PinLost: a table is not the planned one, or its pin is gone.
        ResumeMismatch: the transform or the tokenizer is not the bound one.
        UnsupportedColumn, NoSuchColumn: a column cannot become a tensor.
    """
    read: dict[str, Plan] = {}
    sources = []
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        own = {plan_id: plans.load(plan_id, table=source.table) for plan_id in mine.start.plan_ids}
        read |= own
        table, snapshots = plans.lakehouse.load(source.table), {plan.row.snapshot_id for plan in own.values()}
        sources.append(_open_source(table, source, mine, snapshots, packed=bool(leg.sequences.length)))
    check_alike({source.leg.name: source.kinds for source in sources if source.kinds})
    tokenizer = load_tokenizer(spec.sequences.tokenizer) if leg.sequences.tokenizer else None
    if tokenizer is not None and tokenizer.digest != leg.sequences.tokenizer:
        raise _changed("tokenizer", spec.sequences.tokenizer)
    units = {plan_id: plan.units for plan_id, plan in read.items()}
    return OpenLeg(leg=leg, spec=spec, order=leg.order(units), units=units, sources=tuple(sources), tokenizer=tokenizer)


def _open_source(
    table: Table, spec: SourceSpec, mine: LegSource, snapshot_ids: Collection[int], *, packed: bool
) -> OpenSource:
    check_same_table(spec.table, planned_uuid=mine.table_uuid, uuid=str(table.metadata.table_uuid))
    schema = table.schemas()[mine.schema_id]
    transform = load_transform(spec.transform) if spec.transform else None
    if (transform.digest if transform else "") != mine.transform:
        raise _changed("transform", spec.transform)
    kinds = {} if packed or transform else kinds_of(schema, mine.columns, mine.ragged, mine.nullable)
    return OpenSource(leg=mine, decoder=open_decoder(table, mine, snapshot_ids), kinds=kinds, transform=transform)


def _changed(what: str, name: str) -> ResumeMismatch:
    return ResumeMismatch(
        f"expected the {what} with which the leg was planned, found another one at {name!r}: restore it, or start a run "
        "under another name"
    )


def _as_columns(source: OpenSource) -> Callable[[Stretch, pa.Table], Columns]:
    def prepare(stretch: Stretch, table: pa.Table) -> Columns:
        origin, live = _origin(stretch), _live_mask(stretch)
        return {name: to_column(table[name], kind, origin=origin, live=live) for name, kind in source.kinds.items()}

    return prepare


def _as_samples(source: OpenSource) -> Callable[[Stretch, pa.Table], Samples]:
    checks = iter([True])

    def prepare(stretch: Stretch, table: pa.Table) -> Samples:
        live, positions = _live(stretch, table)
        return samples_of(
            live,
            positions,
            transform=source.transform,
            reject="quarantine" if source.leg.on_reject == "quarantine" else "fail",
            check=next(checks, False),
            origin=_origin(stretch),
        )

    return prepare


def _open_sampled(blocks: SourceBlocks[Samples]) -> Callable[[int, Cursor], Stream]:
    def open_from(group: int, cursor: Cursor) -> Stream:
        walk = blocks.walk(group, cursor)
        return ItemStream(walk, Sampler(_numbered(walk), start=cursor))

    return open_from


def _nbytes(prepared: Documents | Samples) -> int:
    return prepared.nbytes


def _live(stretch: Stretch, table: pa.Table) -> tuple[pa.Table, np.typing.NDArray[np.int64]]:
    """The rows of a stretch in reading order, and their positions in the block."""
    block = stretch.block
    return take_rows(table, block.rows_of(stretch.start, stretch.stop)), block.positions_of(stretch.start, stretch.stop)


def _live_mask(stretch: Stretch) -> np.typing.NDArray[np.bool_] | None:
    """Return the live rows of a range's slices as a mask, or None where all are live."""
    block = stretch.block
    if block.live_rows == block.rows:
        return None
    mask = np.zeros(block.rows, dtype=np.bool_)
    mask[block.rows_of(0, block.live_rows)] = True
    first = 0 if stretch.portion is None else int(block.base[stretch.portion[0]])
    mask = mask[first : first + int(stretch.slices.rows.sum())]
    return None if mask.all() else mask


def _origin(stretch: Stretch) -> str:
    """The data files of a block, for messages."""
    units = stretch.cut.units
    paths = [units.file_paths[file] for file in dict.fromkeys(units.file[stretch.block.slices.unit].tolist())]
    more = f" and {len(paths) - 3} more files" if len(paths) > 3 else ""
    return ", ".join(repr(path) for path in paths[:3]) + more


def _numbered(walk: BlockWalk[Any]) -> Any:
    return ((stretch.pass_index, stretch.block.index, content) for stretch, content in walk)
