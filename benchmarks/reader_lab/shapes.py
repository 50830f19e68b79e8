"""Shapes of tables: types and widths of columns, sizes of row groups and batches, deleted rows, a row filter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.schema import assign_fresh_schema_ids

from dlac_pipeline.extensions.loader_check.tables import NAMESPACE, Lake
from tests.integration.iceberg_writer import HandTable

Columns = dict[str, pa.Array]
Make = Callable[[np.random.Generator, int], Columns]
"""Makes so many rows."""
_FILE_BYTES = 2**26
"""Bytes of a data file, about: at least one row group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A table, and the columns that are read of it. `row_bytes` is the width of all its columns, about."""

    name: str
    make: Make
    rows: int
    row_bytes: int
    group_rows: int
    columns: tuple[str, ...] = ("value",)
    batch_size: int
    dead: float = 0.0
    """Share of rows that position deletes name."""
    row_filter: str | None = None
    ragged: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()

    @property
    def is_merged(self) -> bool:
        """True if a reader of data files alone would give wrong rows."""
        return bool(self.dead or self.row_filter)


def shapes(*, quick: bool) -> list[Shape]:
    """Return all shapes, of about a gigabyte, or with `quick` of a fourth of that."""
    part = 4 if quick else 1
    narrow = Shape(name="narrow", make=_floats, rows=4_800_000 // part, row_bytes=240, group_rows=65_536, batch_size=1024,
                   columns=("f3", "f30", "f57"))  # fmt: skip
    return [
        narrow,
        replace(narrow, name="narrow_batch_16", rows=480_000 // part, batch_size=16),
        replace(narrow, name="narrow_batch_8192", batch_size=8192),
        Shape(name="bytes_1kb", make=_bytes(1024), rows=800_000 // part, row_bytes=1024, group_rows=8192, batch_size=512),
        Shape(name="images_30kb", make=_bytes(30_000), rows=32_000 // part, row_bytes=30_000, group_rows=500, batch_size=64),
        Shape(name="bytes_1mb", make=_bytes(2**20), rows=960 // part, row_bytes=2**20, group_rows=16, batch_size=16),
        Shape(name="lists", make=_lists, rows=240_000 // part, row_bytes=4096, group_rows=2048, batch_size=64),
        Shape(name="large_groups", make=_lists, rows=262_144 // part, row_bytes=4096, group_rows=131_072 // part, batch_size=64),
        Shape(name="ragged_lists", make=_ragged, rows=400_000 // part, row_bytes=2048, group_rows=4096, batch_size=64,
              ragged=("value",)),
        Shape(name="fixed_2kb", make=_fixed, rows=480_000 // part, row_bytes=2048, group_rows=4096, batch_size=64),
        Shape(name="strings", make=_strings, rows=9_600_000 // part, row_bytes=40, group_rows=131_072, batch_size=1024),
        Shape(name="nullable", make=_with_nulls, rows=9_600_000 // part, row_bytes=24, group_rows=131_072, batch_size=1024,
              columns=("a", "b", "c"), nullable=("a", "b", "c")),
        Shape(name="deletes", make=_with_kind, rows=3_000_000 // part, row_bytes=24, group_rows=131_072, batch_size=1024,
              columns=("a", "b", "c"), dead=0.2),
        Shape(name="deletes_and_filter", make=_with_kind, rows=3_000_000 // part, row_bytes=24, group_rows=131_072,
              batch_size=1024, columns=("a", "b", "c"), dead=0.2, row_filter="kind < 5"),
    ]  # fmt: skip


def build(home: Path, shape: Shape) -> None:
    """Make the table of a shape."""
    lake = Lake(home)
    if not shape.dead:
        lake.create(shape.name, list(_files(shape)), shape.group_rows)
        return
    first, *others = _files(shape)
    schema = assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(first.schema))
    table = HandTable(root=home / "by-hand" / shape.name, schemas=[schema])
    random = np.random.default_rng(1)
    for rows in (first, *others):
        path = table.append(rows, row_group_rows=shape.group_rows)
        dead = np.flatnonzero(random.random(len(rows)) < shape.dead)
        table.delete_positions({path: dead.tolist()}, bounds=True)
    lake.lakehouse.catalog.register_table(f"{NAMESPACE}.{shape.name}", table.write_metadata())


def _files(shape: Shape) -> Iterator[pa.Table]:
    random = np.random.default_rng(0)
    groups = max(1, _FILE_BYTES // (shape.group_rows * shape.row_bytes))
    for first in range(0, shape.rows, groups * shape.group_rows):
        rows = min(groups * shape.group_rows, shape.rows - first)
        yield pa.table({"row_id": pa.array(np.arange(first, first + rows)), **shape.make(random, rows)})


def _floats(random: np.random.Generator, rows: int) -> Columns:
    return {f"f{at}": pa.array(random.random(rows, dtype=np.float32)) for at in range(60)}


def _bytes(mean: int) -> Make:
    def make(random: np.random.Generator, rows: int) -> Columns:
        lengths = random.integers(mean // 2, 3 * mean // 2, size=rows)
        return {"value": _byte_strings(random, lengths, pa.binary(), largest=256)}

    return make


def _strings(random: np.random.Generator, rows: int) -> Columns:
    return {"value": _byte_strings(random, random.integers(10, 70, size=rows), pa.string(), largest=127)}


def _byte_strings(random: np.random.Generator, lengths: Any, kind: pa.DataType, *, largest: int) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    content = random.integers(0, largest, size=int(offsets[-1]), dtype=np.uint8)
    return pa.Array.from_buffers(kind, len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def _lists(random: np.random.Generator, rows: int) -> Columns:
    return {"value": _token_lists(random, np.full(rows, 1024))}


def _ragged(random: np.random.Generator, rows: int) -> Columns:
    return {"value": _token_lists(random, random.integers(64, 960, size=rows))}


def _token_lists(random: np.random.Generator, lengths: Any) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = random.integers(0, 2**16, size=int(offsets[-1]), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))


def _fixed(random: np.random.Generator, rows: int) -> Columns:
    content = random.integers(0, 2**16, size=(rows, 1024), dtype=np.uint16)
    return {"value": pa.FixedSizeBinaryArray.from_buffers(pa.binary(2048), rows, [None, pa.py_buffer(content)])}


def _with_nulls(random: np.random.Generator, rows: int) -> Columns:
    return {name: pa.array(random.random(rows), mask=random.random(rows) < 0.1) for name in "abc"}


def _with_kind(random: np.random.Generator, rows: int) -> Columns:
    kind = pa.array(random.integers(0, 10, size=rows, dtype=np.int32))
    return {**{name: pa.array(random.random(rows)) for name in "abc"}, "kind": kind}
