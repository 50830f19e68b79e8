"""An Accelerate loop over the dataset: prepared, saved and resumed exactly."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dlac_pipeline.extensions.dataset import DlacDataset, open_dataset
from tests.empty_lakehouse import empty_lakehouse

accelerate: Any = pytest.importorskip("accelerate")

KINDS: dict[str, dict[str, Any]] = {
    "rows": {"columns": ["row_id"], "passes": 2},
    "packed": {"columns": ["tokens"], "length": 16},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a lakehouse: 240 rows with documents of 1 to 30 tokens, each document's token is its row."""
    lakehouse = empty_lakehouse(tmp_path)
    lengths = np.random.default_rng(0).integers(1, 30, 240).tolist()
    documents = pa.array([[row] * length for row, length in enumerate(lengths)], pa.list_(pa.int32()))
    rows = pa.table({"row_id": range(240), "tokens": documents})
    lakehouse.catalog.create_table("src.t", rows.schema, properties={"write.parquet.row-group-limit": "30"}).append(
        rows
    )
    return tmp_path


def opened(home: Path, kind: str = "rows", **more: Any) -> DlacDataset:
    """The dataset of a test."""
    settings = {"table": "src.t", "batch_size": 8, "key_groups": 4, **KINDS[kind], **more}
    return open_dataset(home=home, **settings)


def values(batch: dict[str, Any]) -> list[Any]:
    """Return the rows of a batch, or the tokens."""
    column: list[Any] = (batch["row_id"] if "row_id" in batch else batch["tokens"]).tolist()
    return column


def expected(home: Path, kind: str) -> list[Any]:
    """The batches, read without Accelerate."""
    return [values(batch) for batch in opened(home, kind)]


def test_accelerate_loop_trains_on_rows_alone(home: Path) -> None:
    """A prepared loader, the dataset's own or a plain one, delivers the rows and nothing beside them."""
    accelerator = accelerate.Accelerator(cpu=True)
    for own in (True, False):
        dataset = opened(home, passes=1, row_filter="row_id < 237")
        loader = dataset.loader() if own else torch.utils.data.DataLoader(dataset, batch_size=None)
        found = [row for batch in accelerator.prepare(loader) for row in values(batch)]
        assert sorted(found) == list(range(237))


def test_accelerate_leaves_the_loader_as_it_is(home: Path) -> None:
    """Prepared with model and optimizer, saved and loaded with Accelerate's own state: exact."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset, model = opened(home, "packed"), torch.nn.Linear(16, 1)
    loader = dataset.loader(num_workers=2)
    model, prepared = accelerator.prepare(model, loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(dataset)
    for _ in islice(prepared, 6):
        pass
    accelerator.save_state(str(home / "accelerate"))
    rest = [values(batch) for batch in prepared]
    accelerator.load_state(str(home / "accelerate"))
    assert [values(batch) for batch in prepared] == rest == expected(home, "packed")[6:]


def test_accelerate_loader_is_observed(home: Path) -> None:
    """A plain DataLoader that Accelerate prepared is one batch ahead; `observe` after each step keeps the position exact."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = opened(home)
    loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
    for batch in islice(loader, 4):
        assert dataset.step == batch["dlac"]["step"] + 1
        dataset.observe(batch)
    assert dataset.step == 4
    assert [values(batch) for batch in opened(home, state=dataset.state_dict())] == expected(home, "rows")[4:]
