"""The rows that a loader reads: Iceberg tables of many row groups, and their changes between save and resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary

from dlac_pipeline.extensions.loader_check.protocol import KINDS
from dlac_pipeline.extensions.loader_check.row_log import Ids
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect

NAMESPACE = "bench"


class Lake:
    """A lakehouse in a folder, with tables of generated rows."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lakehouse = connect(LakehouseConfig().at_home(home))
        self.lakehouse.create_namespace(NAMESPACE)

    @property
    def catalog(self) -> dict[str, str]:
        """Properties with which any pyiceberg opens the catalog."""
        config = self.lakehouse.config
        return {"name": config.catalog_name, "type": "sql", "uri": config.uri, "warehouse": config.warehouse}

    def table(self, name: str) -> Table:
        """Return the current table."""
        return self.lakehouse.load(f"{NAMESPACE}.{name}")

    def files(self, name: str) -> list[str]:
        """Return the paths of the data files of the current snapshot, in the order of a scan."""
        return [task.file.file_path.removeprefix("file://") for task in self.table(name).scan().plan_files()]

    def create(self, name: str, batches: list[pa.Table], group_rows: int) -> None:
        """Make a table with one data file per batch, in row groups of `group_rows`."""
        properties = {"write.parquet.row-group-limit": str(group_rows)}
        table = self.lakehouse.catalog.create_table(f"{NAMESPACE}.{name}", batches[0].schema, properties=properties)
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as producer:
            for batch in batches:
                for file in _dataframe_to_data_files(table.metadata, batch, table.io):
                    producer.append_data_file(file)

    def append(self, name: str, rows: pa.Table) -> None:
        """Append one data file."""
        self.table(name).append(rows)

    def delete(self, name: str, begin: int, end: int) -> None:
        """Delete the rows `begin` to `end` by copy on write."""
        self.table(name).delete(f"row_id >= {begin} and row_id < {end}")

    def compact(self, name: str) -> None:
        """Merge all data files into two, with the rows in order: a `replace` snapshot."""
        table = self.table(name)
        rows = table.scan().to_arrow().sort_by("row_id")
        half = rows.num_rows // 2
        with table.transaction() as transaction:
            producer = transaction.update_snapshot().overwrite()
            for task in table.scan().plan_files():
                producer.delete_data_file(task.file)
            for part in (rows.slice(0, half), rows.slice(half)):
                for file in _dataframe_to_data_files(table.metadata, part.combine_chunks(), table.io):
                    producer.append_data_file(file)
            _set_replace(producer)
            producer.commit()


def _set_replace(producer: Any) -> None:
    """Set the operation of an uncommitted snapshot to `replace`, which pyiceberg does not have."""
    summarize = producer._summary

    def summary(*args: Any, **options: Any) -> Summary:
        return Summary(Operation.REPLACE, **summarize(*args, **options).additional_properties)

    producer._summary = summary


def sequences(begin: int, end: int, length: int) -> pa.Table:
    """Return rows `begin` to `end`, each with `length` tokens. The first token is the row id."""
    tokens = np.random.default_rng(begin).integers(0, 50_000, size=(end - begin, length), dtype=np.int32)
    tokens[:, 0] = np.arange(begin, end)
    return token_rows(begin, tokens)


def token_rows(begin: int, tokens: NDArray[np.int32]) -> pa.Table:
    """Return rows from `begin` on, with these tokens, int32[rows, length]."""
    rows, length = tokens.shape
    return _table(np.arange(begin, begin + rows), tokens.reshape(-1), np.arange(rows + 1) * length)


def packable(begin: int, end: int, starts: Ids) -> pa.Table:
    """Return rows `begin` to `end`. The tokens of all documents are numbered, so that each is unique."""
    tokens = np.arange(starts[begin], starts[end], dtype=np.int32)
    return _table(np.arange(begin, end), tokens, starts[begin : end + 1] - starts[begin])


def document_starts(rows: int, mean: int) -> Ids:
    """Return the number of each document's first token, and the number after the last token."""
    lengths = np.random.default_rng(7).integers(mean // 8, 2 * mean, size=rows)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _table(ids: Any, tokens: Any, offsets: Any) -> pa.Table:
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens))
    kinds = pa.array((ids * 7 % KINDS).astype(np.int32))
    return pa.table({"row_id": pa.array(ids.astype(np.int64)), "kind": kinds, "tokens": lists})
