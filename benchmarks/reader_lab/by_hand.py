"""Loaders that a careful user writes in an hour, over `ParquetFile.iter_batches` or pyiceberg's batch reader, and bare scans."""

import importlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from pyiceberg.table import DataScan
from torch.utils.data import IterableDataset

_stateful = importlib.import_module("torchdata.stateful_dataloader")
Tensors = dict[str, torch.Tensor]
_BLOCK_GROUPS = 4
"""Row groups among which rows are shuffled."""


class HandRows(IterableDataset[Tensors]):
    """Batches of Parquet files or of record batches, with a state: the number of batches given."""

    def __init__(self, files: list[str], columns: list[str], batch_size: int, *, shuffle: bool = False) -> None:
        self._files, self._columns, self._batch_size, self._shuffle = files, columns, batch_size, shuffle
        self._given = 0

    def __iter__(self) -> Iterator[Tensors]:
        tables = self._shuffled() if self._shuffle else regrouped(self._in_order(), self._batch_size)
        for table in tables:
            self._given += 1
            yield {name: tensor for each in self._columns for name, tensor in to_tensors(each, table[each])}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember how many batches were given."""
        self._given = state["given"]

    def _in_order(self) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            yield from pq.ParquetFile(file).iter_batches(self._batch_size, columns=self._columns)

    def _shuffled(self) -> Iterator[pa.Table]:
        """Read row groups in random order, a few at a time, and take their rows in random order."""
        random = np.random.default_rng(0)
        opened = [pq.ParquetFile(file) for file in self._files]
        groups = [(file, group) for file in opened for group in range(file.num_row_groups)]
        random.shuffle(groups)
        for first in range(0, len(groups), _BLOCK_GROUPS):
            block = pa.concat_tables(
                file.read_row_group(group, self._columns) for file, group in groups[first : first + _BLOCK_GROUPS]
            ).combine_chunks()
            order = random.permutation(len(block))
            for start in range(0, len(block), self._batch_size):
                yield block.take(order[start : start + self._batch_size])


class ScannedRows(IterableDataset[Tensors]):
    """Batches of a table with deletes and a filter, from pyiceberg's batch reader."""

    def __init__(self, scan: DataScan, columns: list[str], batch_size: int) -> None:
        self._scan, self._columns, self._batch_size = scan, columns, batch_size

    def __iter__(self) -> Iterator[Tensors]:
        for table in regrouped(self._scan.to_arrow_batch_reader(), self._batch_size):
            yield {name: tensor for each in self._columns for name, tensor in to_tensors(each, table[each])}


def regrouped(parts: Iterable[pa.RecordBatch], batch_size: int) -> Iterator[pa.Table]:
    """Yield tables of `batch_size` rows, and one of the rest."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for part in parts:
        held.append(part)
        rows += len(part)
        if rows < batch_size:
            continue
        table, start = pa.Table.from_batches(held), 0
        for start in range(0, rows - batch_size + 1, batch_size):
            yield table.slice(start, batch_size)
        held, rows = table.slice(start + batch_size).to_batches(), rows - start - batch_size
    if rows:
        yield pa.Table.from_batches(held)


def to_tensors(name: str, column: pa.ChunkedArray) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a column, without a copy where Arrow has none: values, and offsets of values of several lengths."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    kind = array.type
    if array.null_count:
        yield f"{name}.valid", _tensor(array.is_valid().to_numpy(zero_copy_only=False))
        array = array.fill_null(0)
    if pa.types.is_list(kind):
        offsets = array.offsets.to_numpy()
        lengths, values = np.diff(offsets), array.flatten().to_numpy()
        if (lengths == lengths[0]).all():
            yield name, _tensor(values.reshape(len(array), -1))
            return
        yield name, _tensor(values)
        yield f"{name}.offsets", _tensor(offsets - offsets[0])
    elif pa.types.is_fixed_size_binary(kind):
        values = np.frombuffer(array.buffers()[1], np.uint8).reshape(-1, kind.byte_width)
        yield name, _tensor(values[array.offset : array.offset + len(array)])
    elif pa.types.is_binary(kind) or pa.types.is_string(kind):
        offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
        yield name, _tensor(np.frombuffer(array.buffers()[2], np.uint8)[offsets[0] : offsets[-1]])
        yield f"{name}.offsets", _tensor(offsets - offsets[0])
    else:
        yield name, _tensor(array.to_numpy())


def _tensor(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is read-only
        return torch.from_numpy(array)


def stateful(rows: IterableDataset[Tensors]) -> Iterator[Tensors]:
    """Iterate over rows as torchdata's loader does in this process."""
    return iter(_stateful.StatefulDataLoader(rows, batch_size=None, num_workers=0))


def scan_files(files: list[str], columns: list[str], batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of pyarrow's scanner."""
    return iter(ds.dataset(files).scanner(columns=columns, batch_size=batch_size).to_batches())
