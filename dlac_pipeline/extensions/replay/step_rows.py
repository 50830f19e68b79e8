"""Rows of an optimizer step: by the ledger the leg and the ranks, by the order the rows, by the data files their values."""

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from dlac_pipeline.extensions.replay.committed_steps import CommittedStep, CommittedSteps, start_of
from dlac_pipeline.extensions.replay.sample_rows import SampleRow, sample_rows, undecoded_streams
from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table
from dlac_pipeline.plan.cut import Slices
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claims import spec_of_attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow(SampleRow):
    """A row of a step, and the first rank that trained on it."""

    run: str
    step: int
    rank: int
    node: str | None
    """Node of the rank, or None where the ledger does not have it."""
    source_table: str
    value: Any = None
    """Value of the requested column."""

    def to_json(self) -> dict[str, Any]:
        """Return this row as plain data. `asdict` copies each value, which takes longer than the order of all rows."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = [each.name for each in fields(StepRow)]
_TEXTS = ("run", "node", "source_table", "plan_id", "file_path")
_VIEW = pa.schema([(name, pa.string() if name in _TEXTS else pa.int64()) for name in _NAMES if name != "value"])
_SAMPLE = [each.name for each in fields(SampleRow)]
_MACRO = "rows_of_step"
_ANY_CALL = re.compile(_MACRO + r"\s*\(", re.IGNORECASE)
_CALL = re.compile(_MACRO + r"\s*\(\s*'((?:[^']|'')+)'\s*,\s*(\d+)\s*\)", re.IGNORECASE)


def define_rows_of_step(
    connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse, query: str, spec_of: Callable[[str], JobSpec | None]
) -> None:
    """Define the macro `rows_of_step('RUN', STEP)` for the calls in a query, with the columns of `StepRow` but `value`.

    `spec_of` returns the job spec that is given for a run. Raise `SpecInvalid` if the macro's arguments are no literals.
    """
    found = _CALL.findall(query)
    if not found or len(found) < len(_ANY_CALL.findall(query)):
        raise SpecInvalid(f"expected literals as in FROM {_MACRO}('my-run', 4210), found other arguments in {query!r}")
    calls = sorted({(run.replace("''", "'"), int(step)) for run, step in found})
    rows = [row.to_json() for run, step in calls for row in StepRows(lakehouse, run, spec=spec_of(run)).of(step)]
    connection.register("computed_rows_of_steps", pa.Table.from_pylist(rows, schema=_VIEW))
    connection.execute(
        f"CREATE OR REPLACE MACRO {_MACRO}(of_run, of_step) AS TABLE "
        "FROM computed_rows_of_steps WHERE run = of_run AND step = of_step"
    )


class StepRows:
    """The rows of steps of one run. Its ledger rows and plans are read once."""

    def __init__(self, lakehouse: Lakehouse, run: str, *, spec: JobSpec | None = None) -> None:
        """`spec` is for packed and transformed legs. Without it the job spec of the attempt is used, if this node has it."""
        self.lakehouse = lakehouse
        self.run = run
        self._spec = spec
        self.steps = CommittedSteps(lakehouse, run)
        self._plans = Plans(lakehouse)
        self._orders: dict[int, LegOrder] = {}

    def of(self, step: int, *, rank: int | None = None, column: str | None = None) -> list[StepRow]:
        """Return the rows of a step, or of one rank in it, in the order of slots, with the values of a column.

        Raises:
            SpecInvalid: the run has not trained the step, or not committed it, or trained it without that rank.
            NoSuchJobSpec: the step is of a packed or transformed leg, and its job spec is not on this node.
            NoSuchColumn: a source has no such column.
            TableReplaced, PinLost: the table of such a leg, or one with the column, is not the planned one, or lost its pin.
            UnitUnreadable: a data file that is read is gone.
        """
        return self.of_found(self.steps.find(step), rank=rank, column=column)

    def of_found(self, found: CommittedStep, *, rank: int | None = None, column: str | None = None) -> list[StepRow]:
        """Return the rows of a step that was found. Raises as `of`."""
        readers, batch_size = found.readers, found.leg.batch_size
        ranks = [each for mine in readers for each in mine]
        if rank is not None and rank not in ranks:
            is_range = ranks == list(range(len(ranks)))
            known = f"0 to {len(ranks) - 1}" if is_range else ", ".join(map(str, ranks))
            raise SpecInvalid(
                f"expected one of the ranks {known} of step {found.step}, found {rank}: name one of these"
            )
        own = next((index for index, each in enumerate(readers) if rank in each), None)
        slots = range(batch_size) if own is None else DataCoordinate(own, len(readers)).slots(batch_size)
        samples = self._samples(found, slots)
        read_by = [reader_of(each.slot, len(readers), batch_size) for each in samples]
        values = [None] * len(samples) if column is None else self.values(found.leg, samples, column)
        return [
            StepRow(
                run=self.run,
                step=found.step,
                rank=readers[reader][0] if rank is None else rank,
                node=found.nodes[reader] if found.nodes else None,
                source_table=found.leg.sources[each.source].table,
                value=value,
                **{name: getattr(each, name) for name in _SAMPLE},
            )
            for each, value, reader in zip(samples, values, read_by, strict=True)
        ]

    def tables(self, leg: Leg) -> list[str]:
        """Return the present name of each source's table."""
        return [each.table for each in (self._spec or leg).sources]

    def values(self, leg: Leg, rows: Sequence[SampleRow], column: str) -> list[Any]:
        """Return the values of a column in rows of a leg. Raises as `of`."""
        return values_of(self._plans, leg, self.tables(leg), rows, column)

    def _samples(self, found: CommittedStep, slots: range) -> list[SampleRow]:
        leg = found.leg
        if any(leg.streamed):
            return self._streamed_samples(found, slots)
        if leg.index not in self._orders:  # needs no table and no pin
            self._orders[leg.index] = leg.order({each: self._plans.read(each).units for each in leg.plan_ids})
        order = self._orders[leg.index]
        step = self.steps.original(found, order)
        state = order.reader_state(step - 1) if step - 1 > leg.start_step else start_of(leg)
        streams = undecoded_streams(order)
        return list(sample_rows(order, step, slots, since=step - 1, state=state, open_stream=streams))

    def _streamed_samples(self, found: CommittedStep, slots: range) -> list[SampleRow]:
        """Return the rows of a step that reading alone can show."""
        # They import PyTorch, which takes longer than the rows of a step of a counted leg.
        from dlac_pipeline.read.opening.open_leg import open_leg
        from dlac_pipeline.read.reader import open_streams

        leg = found.leg
        spec = self._spec or spec_of_attempt(self.lakehouse, self.steps.rows, self.run, found.checkpoint.attempt)
        opened = open_leg(self._plans, leg, spec)
        state, since = self.steps.state_before(found)
        budget = spec.read.budget_mb * 2**20
        with closing(Prefetcher(threads=spec.read.threads, budget_bytes=budget)) as prefetch:
            streams = open_streams(opened, prefetch)
            return list(sample_rows(opened.order, found.step, slots, since=since, state=state, open_stream=streams))


def values_of(plans: Plans, leg: Leg, tables: Sequence[str], samples: Sequence[SampleRow], column: str) -> list[Any]:
    """Return the values of a column, one for each row. `tables` has the present names of the leg's tables.

    Raises:
        NoSuchColumn: a source has no such column.
        NoSuchTable, TableReplaced: a table is gone, or is not the planned one.
        UnitUnreadable: a data file is gone.
    """
    values: list[Any] = [None] * len(samples)
    parts: dict[tuple[int, str], list[int]] = {}
    for index, each in enumerate(samples):
        parts.setdefault((each.source, each.plan_id), []).append(index)
    for (source, plan_id), mine in parts.items():
        # Each row group is decoded once.
        mine.sort(key=lambda index: (samples[index].unit, samples[index].unit_row))
        decoder = _open_column(plans, replace(leg.sources[source], table=tables[source]), column)
        ones = np.ones(len(mine), dtype=np.int64)
        chosen, first = (np.array([getattr(samples[i], name) for i in mine]) for name in ("unit", "unit_row"))
        table = decoder.decode(plans.read(plan_id).units, Slices(chosen, first, ones, ones))
        for index, value in zip(mine, table[column].to_pylist(), strict=True):
            values[index] = value
    return values


def _open_column(plans: Plans, source: LegSource, column: str) -> BlockDecoder:
    table = plans.lakehouse.load(source.table)
    check_same_table(source.table, planned_uuid=source.table_uuid, uuid=str(table.metadata.table_uuid))
    names = [field.name for field in table.schemas()[source.schema_id].fields]
    if column not in names:
        raise NoSuchColumn.of(f"--text, of table {source.table!r}", column, names)
    snapshots = {plans.row(plan_id).snapshot_id for plan_id in source.start.plan_ids}
    return open_decoder(table, replace(source, columns=(column,)), snapshots)


def reader_of(slot: int, readers: int, batch_size: int) -> int:
    """Return the index of the coordinate that a slot belongs to, among `readers`."""
    return ((slot + 1) * readers - 1) // batch_size
