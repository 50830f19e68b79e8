"""Ranks that read one dataset together, with real processes and a real process group."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.extensions.dataset import open_dataset
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from tests.empty_lakehouse import empty_lakehouse
from tests.engine_ranks import run_program

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"table": "src.t", "columns": ["tokens"], "length": 16, "batch_size": 8, "key_groups": 2}
OPENED = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from dlac_pipeline.extensions.dataset import open_dataset

folder, workers, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group("gloo")
dataset = open_dataset(home=folder, **settings)
"""
ENDED = """
with open(f"{folder}/rank-{dist.get_rank()}.json", "w") as stream:
    json.dump(saying, stream)
dist.destroy_process_group()
"""
PROGRAM = """
steps, state = [], None
for batch in dataset.loader(num_workers=workers):
    about = batch["dlac"]
    steps.append([about["step"], batch["tokens"].tolist(), about["valid"].tolist(), about["rows"], about["tokens"]])
    if about["step"] == 9:
        state = dataset.gathered_state()
    dist.barrier()
place = [dataset.coordinate.index, dataset.coordinate.count]
saying = {"steps": steps, "state": state, "place": place, "end": dataset.gathered_state()}
"""


PLAIN_LOOP = """
column = settings["columns"][0]
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
rows = []
for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
    rows.append(batch[column].tolist())
    loss = model(batch[column].float().reshape(-1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
saying = {"rows": rows, "weights": [each.flatten().tolist() for each in model.parameters()]}
"""


@pytest.fixture
def lakehouse(tmp_path: Path) -> Lakehouse:
    """120 documents of very different length, so that key groups have different numbers of sequences."""
    found = empty_lakehouse(tmp_path)
    lengths = np.random.default_rng(1).geometric(0.04, 120).tolist()
    documents = pa.array([[1 + row] * length for row, length in enumerate(lengths)], pa.list_(pa.int32()))
    rows = pa.table({"tokens": documents, "row_id": range(1, 121)})
    found.catalog.create_table("src.t", rows.schema, properties={"write.parquet.row-group-limit": "20"})
    found.load("src.t").append(rows)
    return found


def run(folder: Path, world_size: int, workers: int, program: str = PROGRAM, **settings: Any) -> list[dict[str, Any]]:
    """Return the report of each rank after its last batch."""
    arguments = (str(folder), str(workers), json.dumps({**SETTINGS, **settings}))
    ranks = run_program(world_size, "-c", OPENED + program + ENDED, *arguments, PYTHONPATH=str(ROOT))
    if any(ranks.codes):
        raise RuntimeError("\n".join(ranks.stderr))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_ranks_share_streamed_dataset(lakehouse: Lakehouse, tmp_path: Path, workers: int) -> None:
    """Every rank has the same number of batches, short or empty at the end. Rows, counts and states equal one rank's."""
    reports = run(tmp_path, 2, workers)
    alone = open_dataset(lakehouse=lakehouse, **SETTINGS)
    states = {0: alone.state_dict()}
    batches = []
    for batch in alone:
        batches.append(batch)
        states[batch["dlac"]["step"]] = alone.state_dict()
    assert [each["place"] for each in reports] == [[0, 2], [1, 2]]
    assert [len(each["steps"]) for each in reports] == [len(batches)] * 2
    assert min(len(each["steps"][-1][2]) for each in reports) < 4
    for index, batch in enumerate(batches):
        parts = [each["steps"][index] for each in reports]
        assert {part[0] for part in parts} == {index + 1}
        assert list(chain(*(part[1] for part in parts))) == batch["tokens"].tolist()
        assert list(chain(*(part[2] for part in parts))) == batch["dlac"]["valid"].tolist()
        assert {(part[3], part[4]) for part in parts} == {(batch["dlac"]["rows"], batch["dlac"]["tokens"])}
    assert reports[0]["state"] == reports[1]["state"] == states[9]
    assert reports[0]["end"] == reports[1]["end"]
    assert list(open_dataset(lakehouse=lakehouse, state=reports[0]["end"], **SETTINGS)) == []


def test_missing_table_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 reports the missing table, and no rank waits endlessly."""
    connect(LakehouseConfig().at_home(tmp_path))
    with pytest.raises(RuntimeError, match=r"rank 0 could not plan the dataset: .* table named 'src.t'"):
        run(tmp_path, 2, 0)


@pytest.mark.parametrize("rows", [113, pytest.param(117, marks=pytest.mark.soak)])
def test_plain_loop_of_ranks_ends_together(lakehouse: Lakehouse, tmp_path: Path, rows: int) -> None:
    """With DDP and plain means each row is read once, no rank waits, and a rank without a row does not change the weights."""
    settings: dict[str, Any] = {"columns": ["row_id"], "length": 0, "row_filter": f"row_id <= {rows}"}
    found = run(tmp_path, 2, 0, PLAIN_LOOP, **settings)
    assert [len(each["rows"]) for each in found] == [15, 15]
    assert sorted(row for each in found for batch in each["rows"] for row in batch) == list(range(1, rows + 1))
    assert found[0]["weights"] == found[1]["weights"]
    assert np.isfinite(np.array(found[0]["weights"])).all()
    assert [len(each["rows"][-1]) for each in found] == ([0, 1] if rows == 113 else [2, 3])
