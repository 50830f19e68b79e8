"""The lakehouse of `benchmarks.provenance`: plan, slices, and the ledgers of a run and its forks, written by column."""

import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.state import leg_of_tokens, source_of_tokens, write_plan_elsewhere
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.arrow_rows import CONSUMPTION_ARROW
from dlac_pipeline.lakehouse.ledger.plans import read_units
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, ForkRow, LedgerRow, LegRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import unit_table
from dlac_pipeline.plan.slices import cut_id_of, write_cut

_RUNS, _SHARE, _PER_GROUP, _APPENDED = 20, 0.81, 8, 250
"""Runs, share of the first one in the checkpoints, samples of a key group in a step, and checkpoints in a data file."""


def write_lakehouse(home: Path, units: int, checkpoints: int) -> None:
    """Write plan, slices and ledger, and what is asked for."""
    plan = write_plan_elsewhere(home, units)
    lakehouse = connect(LakehouseConfig().at_home(home))
    leg = leg_of_tokens(source_of_tokens(plan.plan_id, passes=1))
    order = leg.order({plan.plan_id: unit_table(read_units(lakehouse, plan))})
    cut = order.sources[0].cut_of(0)
    write_cut(lakehouse, plan.plan_id, cut)
    cut_id, last = cut_id_of(plan.plan_id, cut), order.total_steps
    assert last is not None
    blocks = _block_rows(lakehouse)
    first = int(checkpoints * _SHARE) if checkpoints >= 2 * _RUNS else checkpoints
    counts = [first, *_parts(checkpoints - first, _RUNS - 1)]
    parent: tuple[str, str, int] | None = None
    for number, count in enumerate(count for count in counts if count):
        run = f"run-{number:02d}"
        until = last * 98 // 100 if number == 0 else max(count, last * count // max(first, 1))
        steps = np.linspace(0, min(until, last * 98 // 100), count + 1).astype(np.int64)[1:]
        names = _write_run(lakehouse, leg, run, steps, blocks, (plan.plan_id, cut_id), parent)
        parent = (run, *names[len(names) // 2])
        if number == 0:
            middle = names[len(names) // 2][0]
            file, row = _consumed_row(lakehouse, cut_id, run, middle)
            asked = {"run": run, "checkpoint": middle, "file": file, "row": row}
            asked |= {"row_groups": units, "checkpoints": checkpoints}
            (home / "asked.json").write_text(json.dumps(asked))
    shutil.move(home / "asked.json", home / "questions.json")


def _consumed_row(lakehouse: Lakehouse, cut_id: str, run: str, checkpoint: str) -> tuple[str, int]:
    """Return a data file, and one of its rows, that a checkpoint consumed: of its last advance, by plain SQL."""
    connection = duckdb.connect()
    for name in ("consumption", "slices", "work_units"):
        connection.register(name, lakehouse.read_own(name))
    found = connection.execute(
        "SELECT u.file_path, u.first_row + s.first_row + (s.a * a.position_start + s.c) % s.block_rows - s.base "
        "FROM consumption AS a JOIN slices AS s USING (cut_id, key_group, block) JOIN work_units AS u USING (unit) "
        "WHERE a.kind = 'advance' AND a.run = $1 AND a.checkpoint_id = $2 AND a.cut_id = $3 "
        "AND (s.a * a.position_start + s.c) % s.block_rows >= s.base "
        "AND (s.a * a.position_start + s.c) % s.block_rows < s.base + s.rows ORDER BY ALL LIMIT 1",
        [run, checkpoint, cut_id],
    ).fetchall()
    return str(found[0][0]), int(found[0][1])


def _parts(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _block_rows(lakehouse: Lakehouse) -> list[np.ndarray[Any, Any]]:
    """Return the rows of each block in order, for each key group."""
    slices = lakehouse.read_own("slices", columns=("key_group", "block", "block_rows"))
    blocks = slices.group_by(["key_group", "block"]).aggregate([("block_rows", "max")])
    blocks = blocks.sort_by([("key_group", "ascending"), ("block", "ascending")])
    groups, rows = blocks["key_group"].to_numpy(), blocks["block_rows_max"].to_numpy()
    return np.split(rows, np.flatnonzero(np.diff(groups)) + 1)


def _write_run(
    lakehouse: Lakehouse,
    leg: Leg,
    run: str,
    steps: np.ndarray[Any, Any],
    blocks: Sequence[np.ndarray[Any, Any]],
    ids: tuple[str, str],
    parent: tuple[str, str, int] | None,
) -> list[tuple[str, int]]:
    """Write the rows of a run with a checkpoint at each of `steps`. A fork continues from the step of its parent."""
    common = {"run": run, "attempt": 1, "nonce": run[-4:], "committed_at": datetime.now(UTC), "format_version": 1}
    start = 0 if parent is None else parent[2]
    names = [(f"{run}-{start + int(step):09d}-0000", start + int(step)) for step in steps]
    rows: list[LedgerRow] = [ClaimRow(seq=1, host="node")]
    previous, seq = None, 2
    if parent is not None:
        previous, seq = f"{run}-{start:09d}-fork", 3
        fork = ForkRow(parent_run=parent[0], parent_checkpoint=parent[1], parent_step=parent[2])
        rows += [CheckpointRow(seq=2, checkpoint_id=previous, head_after=previous, step=start)]
        columns = {**fork.to_columns(), "seq": 2, "checkpoint_id": previous, "head_after": previous}
        _append(lakehouse, [pa.Table.from_pylist([{**columns, **common}], CONSUMPTION_ARROW)])
    record = {**leg.to_record(), "start_step": start}
    rows.append(
        LegRow(seq=seq, checkpoint_id=names[0][0], head_after=names[0][0], step=start, leg_json=json.dumps(record))
    )
    step_before = start
    for index, (name, step) in enumerate(names):
        rows.append(
            CheckpointRow(
                seq=seq + index,
                checkpoint_id=name,
                head_after=name,
                parent=previous,
                step=step,
                world_size=128,
                applied_steps=step - step_before,
                losses=[0.5] * (step - step_before),
            )
        )
        previous, step_before = name, step
    heads = pa.Table.from_pylist([{**row.to_columns(), **common} for row in rows], schema=CONSUMPTION_ARROW)
    seqs = heads["seq"].to_numpy()
    for first in range(0, len(names), _APPENDED):
        part = slice(first, first + _APPENDED)
        low, high = (0 if first == 0 else seq + first), seq + first + _APPENDED
        advances = _advances(steps, part, blocks, names, ids, seq, start, common)
        _append(lakehouse, [heads.filter(pa.array((seqs >= low) & (seqs < high))), advances])
    # the fence, which a commit caches in a property of the table
    with lakehouse.own("consumption").transaction() as transaction:
        transaction.set_properties({f"dlac.fence.{run}": json.dumps([1, run[-4:], seq + len(names) - 1, names[-1][0]])})
    return names


def _append(lakehouse: Lakehouse, tables: list[pa.Table]) -> None:
    lakehouse.own("consumption").append(pa.concat_tables(tables))


def _advances(
    steps: np.ndarray[Any, Any],
    part: slice,
    blocks: Sequence[np.ndarray[Any, Any]],
    names: Sequence[tuple[str, int]],
    ids: tuple[str, str],
    seq: int,
    start: int,
    common: dict[str, Any],
) -> pa.Table:
    """Return the advances of a part of the checkpoints: of each checkpoint, key group, and block that it moved in."""
    before = int(steps[part.start - 1]) if part.start else 0
    bounds = np.array([before, *steps[part]], dtype=np.int64) * _PER_GROUP
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for group, rows in enumerate(blocks):
        starts = np.concatenate([[0], np.cumsum(rows)])
        inside = starts[(starts > bounds[0]) & (starts < bounds[-1])]
        edges = np.unique(np.concatenate([bounds, inside]))
        low, high = edges[:-1], edges[1:]
        block = np.searchsorted(starts, low, side="right") - 1
        columns = {
            "index": part.start + np.searchsorted(bounds, low, side="right") - 1,
            "key_group": np.full(len(low), group),
            "block": block,
            "position_start": low - starts[block],
            "position_end": high - starts[block],
            "first_step": start + low // _PER_GROUP + 1,
            "last_step": start + (high - 1) // _PER_GROUP + 1,
            "rows_consumed": high - low,
        }
        for name, values in columns.items():
            found.setdefault(name, []).append(values)
    columns = {name: np.concatenate(values) for name, values in found.items()}
    index = columns.pop("index")
    order = np.argsort(index, kind="stable")
    index = index[order]
    arrays: dict[str, Any] = {name: values[order] for name, values in columns.items()}
    ids_of = pa.array([name for name, _ in names])
    checkpoint = ids_of.take(pa.array(index))
    zero = np.zeros(len(index), dtype=np.int64)
    arrays |= {
        "seq": seq + index,
        "step": np.array([step for _, step in names])[index],
        "checkpoint_id": checkpoint,
        "head_after": checkpoint,
        **dict.fromkeys(("leg", "pass", "source", "rows_dead", "rows_filtered", "rows_quarantined"), zero),
    }
    same = {"kind": "advance", "applied": True, "plan_id": ids[0], "cut_id": ids[1], **common}
    nothing = pa.nulls(len(index))
    made = [
        pa.repeat(pa.scalar(same[field.name], field.type), len(index))
        if field.name in same
        else pa.array(arrays[field.name]).cast(field.type)
        if field.name in arrays
        else nothing.cast(field.type)
        for field in CONSUMPTION_ARROW
    ]
    return pa.Table.from_arrays(made, schema=CONSUMPTION_ARROW)
