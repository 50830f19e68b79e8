from collections.abc import Iterable
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dlac_pipeline.lakehouse.files import parquet
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.read import layout, streams
from dlac_pipeline.read import reader as reading
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import Arena


def rows_of(random: np.random.Generator, first: int, count: int) -> pa.Table:
    """Return rows with columns of each kind: fixed width, lists of one length, and values of several lengths."""

    def texts(mean: int) -> list[bytes]:
        return [random.bytes(int(size)) for size in random.integers(0, 2 * mean, size=count)]

    lists = [random.integers(0, 9, size=size).astype(np.int32) for size in random.integers(0, 6, size=count)]
    maybe = [None if value % 3 == 0 else str(value) for value in range(first, first + count)]
    return pa.table(
        {
            "row_id": pa.array(np.arange(first, first + count)),
            "even": pa.array(np.arange(count) % 2 == 0),
            "pair": pa.array(list(random.random((count, 2), dtype=np.float32)), pa.list_(pa.float32())),
            "short": pa.array(texts(12)),
            "long": pa.array(texts(2000)),
            "numbers": pa.array(lists, pa.list_(pa.int32())),
            "maybe": pa.array(maybe),
            "wide": pa.array([None if 40 <= each < 90 else [each] * 80 for each in range(first, first + count)]),
            "kind": pa.array(random.integers(0, 4, size=count)),
        }
    )


def spec_of(arena: Arena, random: np.random.Generator) -> JobSpec:
    """Return a job over one table or two, in any order, with or without dead rows."""

    def source(table: str) -> dict[str, object]:
        columns = ["row_id", "even", "pair", "short", "long", "numbers", "maybe", "wide"]
        declared = {"ragged": ["numbers"], "nullable": ["maybe", "wide"]}
        kept = "kind < 3" if random.integers(2) else None
        return {"table": table, "columns": columns, **declared, "row_filter": kept}

    order = {"shuffle": bool(random.integers(2)), "block_slices": int(random.integers(1, 4)), "passes": 2}
    order |= {"batch_size": 24, "key_groups": int(random.choice([2, 4, 6])), "seed": int(random.integers(99))}
    both = [{**source(name), "name": name[-1], "weight": weight} for name, weight in (("src.a", 3), ("src.b", 1))]
    sources = {"source": both[0], "mixture": both[1:]} if random.integers(2) else {"source": source("src.a")}
    raw = {"run": "r", "lakehouse": arena.config.model_dump(), **sources, "order": order}
    return parse_spec({**raw, "launch": {"script": "none.py"}}, origin="the test").resolved(arena.home)


def facts_of(batches: Iterable[Batch]) -> list[object]:
    """Return all that a batch gives, as comparable values."""
    return [
        (batch.step, batch.rows, batch.valid.tolist(), batch.source.tolist(), batch.cursors.tolist(),
         {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.tensors.items()})
        for batch in batches
    ]  # fmt: skip


def check_rows(batch: Batch, rows: dict[int, dict[str, Any]]) -> None:
    """Check that every slot has the values of its row, or is empty."""
    for slot, here in enumerate(batch.valid.tolist()):
        values = rows[int(batch["row_id"][slot])] if here else dict.fromkeys(rows[0])
        for name, value in values.items():
            begins = batch.tensors.get(f"{name}.offsets", torch.arange(len(batch.valid) + 1))
            found = batch[name][begins[slot] : begins[slot + 1]].flatten().tolist()
            content = [value] if isinstance(value, bool) else value.encode() if isinstance(value, str) else value
            assert found == ([0] * len(found) if content is None else [*content]), name


@pytest.mark.parametrize("seed", range(12))
def test_batches_together_equal_single(arena: Arena, seed: int) -> None:
    """Batches that are gathered together have the values and cursors of batches that are gathered one by one."""
    random = np.random.default_rng(seed)
    kept: dict[int, dict[str, Any]] = {}
    for name in ("src.a", "src.b"):
        rows, properties = (
            rows_of(random, len(kept), 200),
            {"write.parquet.row-group-limit": str(random.integers(5, 60))},
        )
        table = arena.lakehouse.catalog.create_table(name, rows.schema, properties=properties)
        for first in range(0, 200, 80):
            table.append(rows.slice(first, 80))
        kept |= {row.pop("row_id"): row for row in rows.drop_columns("kind").to_pylist()}
    arena.monkeypatch.setattr(layout, "_SEGMENT_BYTES", int(random.choice([2**12, 2**23])))
    spec, readers = spec_of(arena, random), int(random.choice([1, 2, 3, 8]))
    leg = first_leg(spec, [make_plan(arena.lakehouse, source) for source in spec.sources])
    opened = open_leg(Plans(arena.lakehouse), leg, spec)
    arena.monkeypatch.setattr(reading, "_RUN_BYTES", int(random.choice([2**14, 2**18, 2**24])))
    arena.monkeypatch.setattr(parquet, "_PART_BYTES", int(random.choice([2**10, 2**20])))
    arena.monkeypatch.setattr(streams, "PORTION_BYTES", int(random.choice([1, 2**22])))
    waits = bool(random.integers(2))  # then the following blocks are ready
    for index in range(readers):
        coordinate = DataCoordinate(index, readers)
        with (
            closing(opened.reader(coordinate=coordinate)) as reader,
            closing(opened.reader(coordinate=coordinate)) as one,
        ):
            batches, single = [], facts_of(one.every(1))
            for batch in reader:
                batches.append(batch)
                if waits:
                    reader.prefetch.settle()
        assert facts_of(batches) == single
        for batch in batches:
            check_rows(batch, kept)
