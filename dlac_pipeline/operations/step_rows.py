"""Rows of an optimizer step of a run: by the ledger the leg and the ranks, by the order the rows, by the data files their values.

The ledger has no row per step. A counted leg needs only the work units of its plans, also when its data files are gone. A
packed or transformed one is read again from the last checkpoint before the step.
"""

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.plans import get_plan, read_units
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, ForkRow
from dlac_pipeline.plan.cut import Slices
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.plan import Plans, unit_table
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.step_rows import SampleRow, sample_rows, undecoded_streams
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.choose_leg import leg_of
from dlac_pipeline.supervise.claims import spec_of_attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One row of a step: the rank that trained on it, and its place in the source."""

    run: str
    step: int
    rank: int
    node: str | None
    """Node of the rank, or None where the ledger does not have it."""
    slot: int
    """Place of the sample in the global batch, from 0."""
    source: int
    """Number of the source in the job spec, from 0."""
    source_table: str
    pass_index: int
    key_group: int
    file_path: str
    row_group: int
    row: int
    """Row in the data file."""
    first_item: int | None
    """Packed or transformed: first item of the row in this sample, unless that is its very first."""
    end_item: int | None
    """Packed or transformed: end of the row's items in this sample, unless that is its end."""
    value: Any = None
    """Value of the requested column."""

    def to_json(self) -> dict[str, Any]:
        """Return this row as plain data. `asdict` copies each value, which takes longer than the order of all rows."""
        return {name: getattr(self, name) for name in self.__slots__}


_COUNTS = ("step", "rank", "slot", "source", "pass_index", "key_group", "row_group", "row", "first_item", "end_item")
_NAMES = ("run", "node", "source_table", "file_path")
_VIEW = pa.schema([*((name, pa.string()) for name in _NAMES), *((name, pa.int64()) for name in _COUNTS)])
_MACRO = "rows_of_step"
_CALL = re.compile(_MACRO + r"\s*\(\s*'((?:[^']|'')+)'\s*,\s*(\d+)\s*\)", re.IGNORECASE)


def define_rows_of_step(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse, query: str) -> None:
    """Define the macro `rows_of_step('RUN', STEP)` for the calls in a query, with the columns of `StepRow` but `value`.

    Raises:
        SpecInvalid: its arguments are no literals.
    """
    calls = {(run.replace("''", "'"), int(step)) for run, step in _CALL.findall(query)}
    if not calls:
        raise SpecInvalid(f"expected literals as in FROM {_MACRO}('my-run', 4210), found other arguments in {query!r}")
    rows = [row.to_json() for run, step in sorted(calls) for row in StepRows(lakehouse, run).of(step)]
    connection.register("computed_rows_of_steps", pa.Table.from_pylist(rows, schema=_VIEW))
    connection.execute(
        f"CREATE OR REPLACE MACRO {_MACRO}(of_run, of_step) AS TABLE "
        "FROM computed_rows_of_steps WHERE run = of_run AND step = of_step"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A committed step, the leg that it belongs to, and the checkpoints around it."""

    step: int
    leg: Leg
    checkpoint: CheckpointRow
    """The first checkpoint of the surviving lineage that includes the step."""
    parent: CheckpointRow | None


class StepRows:
    """The rows of steps of one run. Its ledger rows and plans are read once."""

    def __init__(self, lakehouse: Lakehouse, run: str, *, spec: JobSpec | None = None) -> None:
        """`spec` is for packed and transformed legs. Without it the job spec of the attempt is used, if this node has it."""
        self._lakehouse = lakehouse
        self._run = run
        self._spec = spec
        self._rows = Ledger(lakehouse).head_rows(run)
        self._checkpoints = checkpoint_rows(self._rows)
        self._lineage = [self._checkpoints[each] for each in lineage_of(self._rows, fence_of_rows(self._rows).head)]
        self._units: dict[str, UnitTable] = {}
        self._orders: dict[int, LegOrder] = {}

    @property
    def last_step(self) -> int:
        """The last committed step."""
        return self._lineage[0].step if self._lineage else 0

    def of(self, step: int, *, column: str | None = None) -> list[StepRow]:
        """Return the rows of a step in the order of slots, with the values of a column as the data files have them.

        Raises:
            SpecInvalid: the run has not trained the step, or not committed it.
            NoSuchJobSpec: the step is of a packed or transformed leg, and its job spec is not on this node.
            NoSuchColumn: a source has no such column.
            PinLost, UnitUnreadable: data files that are read are gone.
        """
        found = self._find(step)
        samples = self._samples(found)
        values = [None] * len(samples) if column is None else self._values(found.leg, samples, column)
        ranks = found.checkpoint.world_size
        nodes = self._nodes_of(found.checkpoint.attempt)
        return [
            StepRow(
                run=self._run,
                step=step,
                rank=(rank := each.slot * ranks // found.leg.batch_size),
                node=nodes[rank] if nodes else None,
                slot=each.slot,
                source=each.source,
                source_table=found.leg.sources[each.source].table,
                pass_index=each.pass_index,
                key_group=each.key_group,
                file_path=each.file_path,
                row_group=each.row_group,
                row=each.row,
                first_item=each.first_item,
                end_item=each.end_item,
                value=value,
            )
            for each, value in zip(samples, values, strict=True)
        ]

    def _find(self, step: int) -> _Step:
        covering = [each for each in self._lineage if each.step >= step]
        if not covering or step < 1:
            raise SpecInvalid(
                f"expected a committed step of run {self._run!r}, 1 to {self.last_step}, found {step}: name one of these"
            )
        checkpoint = covering[-1]
        parent = self._checkpoints.get(checkpoint.parent or "")
        if parent is None:
            self._check_trained(checkpoint, step)
        return _Step(step=step, leg=leg_of(self._rows, checkpoint.checkpoint_id), checkpoint=checkpoint, parent=parent)

    def _check_trained(self, first: CheckpointRow, step: int) -> None:
        """Check that the run itself trained the steps of its first checkpoint."""
        fork = next((each for each in self._rows if isinstance(each, ForkRow)), None)
        if fork is None and first.adopted is None:
            return
        origin = (
            f"forked from run {fork.parent_run!r}, which trained" if fork else f"adopted from {first.adopted!r}, with"
        )
        raise SpecInvalid(
            f"expected a step that run {self._run!r} trained, {first.step + 1} or later, found {step}: its first checkpoint "
            f"was {origin} that step"
        )

    def _samples(self, found: _Step) -> list[SampleRow]:
        leg, step = found.leg, found.step
        if not any(leg.streamed):
            order = self._order(leg)
            state = order.reader_state(step - 1) if step - 1 > leg.start_step else _start_of(leg)
            return list(sample_rows(order, step, since=step - 1, state=state, open_stream=undecoded_streams(order)))
        return self._streamed_samples(found)

    def _streamed_samples(self, found: _Step) -> list[SampleRow]:
        """Return the rows of a step that reading alone can show."""
        # They import PyTorch, which takes longer than the rows of a step of a counted leg.
        from dlac_pipeline.read.opening.open_leg import open_leg
        from dlac_pipeline.read.reader import open_streams

        leg = found.leg
        spec = self._spec or spec_of_attempt(self._lakehouse, self._rows, self._run, found.checkpoint.attempt)
        opened = open_leg(Plans(self._lakehouse), leg, spec)
        self._units.update(opened.units)
        state, since = self._state_before(found)
        budget = spec.read.budget_mb * 2**20
        with closing(Prefetcher(threads=spec.read.threads, budget_bytes=budget)) as prefetch:
            streams = open_streams(opened, prefetch)
            return list(sample_rows(opened.order, found.step, since=since, state=state, open_stream=streams))

    def _order(self, leg: Leg) -> LegOrder:
        """Return the order of a counted leg. It needs no table and no pin."""
        if leg.index not in self._orders:
            for plan_id in leg.plan_ids:
                if plan_id not in self._units:
                    self._units[plan_id] = unit_table(read_units(self._lakehouse, get_plan(self._lakehouse, plan_id)))
            self._orders[leg.index] = leg.order(self._units)
        return self._orders[leg.index]

    def _state_before(self, found: _Step) -> tuple[ReaderState, int]:
        """Return the cursors after the last checkpoint before a step of a streamed leg, and the step of that checkpoint.

        They are where the advances of the leg until then ended, or those with which the leg begins.
        """
        leg, parent = found.leg, found.parent
        state = _start_of(leg)
        if parent is None or parent.step <= leg.start_step:
            return state, leg.start_step
        lineage = set(lineage_of(self._rows, parent.checkpoint_id))
        for row in Ledger(self._lakehouse).rows(self._run, kinds=(AdvanceRow,)):
            if row.checkpoint_id in lineage and row.leg == leg.index:
                groups = state[row.source]
                groups[row.key_group] = max(groups[row.key_group], _cursor_after(row))
        return state, parent.step

    def _values(self, leg: Leg, samples: Sequence[SampleRow], column: str) -> list[Any]:
        """Return the values of a column, one for each row."""
        values: list[Any] = [None] * len(samples)
        parts: dict[tuple[int, str], list[int]] = {}
        for index, each in enumerate(samples):
            parts.setdefault((each.source, each.plan_id), []).append(index)
        for (source, plan_id), mine in parts.items():
            decoder = self._decoder(leg.sources[source], column)
            ones = np.ones(len(mine), dtype=np.int64)
            unit, first = (np.array([getattr(samples[i], name) for i in mine]) for name in ("unit", "unit_row"))
            table = decoder.decode(self._units[plan_id], Slices(unit, first, ones, ones))
            for index, value in zip(mine, table[column].to_pylist(), strict=True):
                values[index] = value
        return values

    def _decoder(self, source: LegSource, column: str) -> BlockDecoder:
        """Return the decoder of one column of a source."""
        table = self._lakehouse.load(source.table)
        check_same_table(source.table, planned_uuid=source.table_uuid, uuid=str(table.metadata.table_uuid))
        names = [field.name for field in table.schemas()[source.schema_id].fields]
        if column not in names:
            raise NoSuchColumn(
                f"expected one of the columns {names!r} of {source.table!r}, found {column!r}: name one of these"
            )
        snapshots = {get_plan(self._lakehouse, plan_id).snapshot_id for plan_id in source.start.plan_ids}
        return open_decoder(table, replace(source, columns=(column,)), snapshots)

    def _nodes_of(self, attempt: int) -> list[str]:
        """Return the node of each rank of an attempt. Empty: the ledger does not have them."""
        known = (each for each in self._checkpoints.values() if each.attempt == attempt and each.rank_nodes)
        first = next(known, None)
        return [node for node, ranks in first.rank_nodes for _ in range(ranks)] if first else []


def _start_of(leg: Leg) -> ReaderState:
    return [list(source.start.cursors) for source in leg.sources]


def _cursor_after(row: AdvanceRow) -> Cursor:
    if row.token_end is None:
        return Cursor(row.pass_index, row.block, row.position_end)
    return Cursor(row.pass_index, row.block, row.position_end - 1, row.token_end)
