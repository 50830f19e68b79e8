"""What the tests of the PyTorch dataset share: tables, datasets of every kind over them, and batches as plain data."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dlac_pipeline.extensions.dataset import DlacDataset, open_dataset
from tests.empty_lakehouse import empty_lakehouse

Seen = list[dict[str, Any]]
_WARNINGS = ("This DataLoader will create", "'set_vital' is deprecated")
LOADER_WARNINGS = [pytest.mark.filterwarnings(f"ignore:{text}") for text in _WARNINGS]
KINDS = {
    "rows": {"columns": ["row_id"], "passes": 2},
    "filtered": {"columns": ["row_id"], "passes": 2, "row_filter": "row_id > 77", "exclude": ["row_id = 100"]},
    "packed": {"columns": ["tokens"], "length": 16, "passes": 2},
    "mixed": {
        "columns": ["tokens"],
        "length": 16,
        "weight": 0.7,
        "mixture": [{"table": "src.b", "columns": ["tokens"]}],
    },
    "transformed": {"columns": ["row_id"], "passes": 2, "transform": "doubled"},
}


def some_kinds(*kinds: str) -> list[Any]:
    """Return all kinds as parameters. `make test` takes some, and `make soak` the rest."""
    return [kind if kind in kinds else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]


DOUBLED = """
import pyarrow as pa

def doubled(batch):
    ids = batch["row_id"].to_pylist()
    rows = pa.array([row for row, row_id in enumerate(ids) for _ in range(row_id % 3)], pa.int64())
    return batch.take(rows)

def named(batch):
    return batch.select(["row_id"]).rename_columns(["dlac"])
"""


@dataclass
class Datasets:
    """Two tables, and datasets over them."""

    home: Path
    opened: dict[str, Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lakehouse = empty_lakehouse(self.home)
        for name in ("src.a", "src.b"):
            self.append(name, rows_of(300))
        (self.home / "doubled.py").write_text(DOUBLED)

    def append(self, name: str, rows: pa.Table) -> None:
        """Append to a table, which is made if there is none."""
        properties = {"write.parquet.row-group-limit": "50"}
        self.lakehouse.catalog.create_table_if_not_exists(name, rows.schema, properties=properties)
        self.lakehouse.load(name).append(rows)

    def open(self, kind: str = "rows", **more: Any) -> DlacDataset:
        """A dataset of a kind."""
        settings = {"table": "src.a", "batch_size": 8, "key_groups": 4, **KINDS[kind], **more}
        if "transform" in settings:
            settings["transform"] = f"{self.home}/doubled.py:{settings['transform']}"
        return open_dataset(home=self.home, **settings)

    def whole(self, kind: str) -> Seen:
        """All batches of a kind, read directly."""
        if kind not in self.opened:
            self.opened[kind] = seen(self.open(kind))
        return self.opened[kind]


def rows_of(count: int, start: int = 0) -> pa.Table:
    """Rows with documents of 0 to 39 tokens."""
    lengths = np.random.default_rng(start).integers(0, 40, count).tolist()
    documents = [[start + row] * length for row, length in enumerate(lengths)]
    return pa.table({"row_id": range(start, start + count), "tokens": pa.array(documents, pa.list_(pa.int32()))})


def seen(batches: Iterable[dict[str, Any]]) -> Seen:
    """Batches as plain data, all that they say."""
    return [{name: plain(value) for name, value in batch.items()} for batch in batches]


def plain(value: Any) -> Any:
    """Tensors as lists."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value
