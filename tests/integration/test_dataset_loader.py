"""Any number of loader workers gives the same batches of the PyTorch dataset, and the position follows the consumer."""

import gc
import re
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, ResumeMismatch, SpecInvalid
from tests.integration.datasets import LOADER_WARNINGS, Datasets, seen, some_kinds

pytestmark = LOADER_WARNINGS


@pytest.mark.parametrize("kind", some_kinds("rows", "mixed"))
def test_any_number_of_workers_gives_the_same_batches(datasets: Datasets, kind: str) -> None:
    """A plain DataLoader and the dataset's loader give the order, content, cursors and counts of reading without workers."""
    whole = datasets.whole(kind)
    assert [batch["dlac"]["step"] for batch in whole] == list(range(1, len(whole) + 1))
    for workers in (0, 3) if kind in ("rows", "packed") else (2,):
        assert seen(DataLoader(datasets.open(kind), batch_size=None, num_workers=workers)) == whole
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}
    assert seen(datasets.open(kind).loader(**options)) == whole


def test_position_is_last_returned_batch(datasets: Datasets) -> None:
    """Nothing counts that is read ahead. `observe` sets the position back to the batch whose step is done."""
    for workers in (0, 2):
        dataset = datasets.open("packed")
        loader = iter(DataLoader(dataset, batch_size=None, num_workers=workers))
        own = datasets.open("packed")
        dataset.observe([next(loader) for _ in range(4)][2])
        assert dataset.step == 3
        assert seen(datasets.open("packed", state=dataset.state_dict())) == datasets.whole("packed")[3:]
        assert own.step == own.state_dict()["step"] == 0
        for step, batch in enumerate(islice(own.loader(num_workers=workers), 3), 1):
            assert batch["dlac"]["step"] == own.step == own.state_dict()["step"] == step


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_has_state_of_consumer(datasets: Datasets, workers: int) -> None:
    """A trainer that saves the state of its loader, as torchtitan does, resumes after the last batch that it received."""
    loader = datasets.open("packed").loader(num_workers=workers)
    assert isinstance(loader, Stateful)
    for _ in islice(loader, 3):
        pass
    again = datasets.open("packed").loader(num_workers=workers)
    again.load_state_dict(loader.state_dict())
    assert seen(again) == datasets.whole("packed")[3:]
    with pytest.raises(ResumeMismatch, match="altered"):
        again.load_state_dict({**loader.state_dict(), "step": 5})


@pytest.mark.soak
def test_iterating_again_goes_on_where_the_consumer_stands(datasets: Datasets) -> None:
    """A loop that was left is resumed, with persistent workers or without. After the last pass nothing follows."""
    whole = datasets.whole("packed")
    for workers, persistent in ((0, False), (2, False), (2, True)):
        loader = datasets.open("packed").loader(num_workers=workers, persistent_workers=persistent)
        assert seen(islice(loader, 5)) + seen(islice(loader, 1)) + seen(loader) == whole
        assert seen(loader) == []
    dataset = datasets.open("packed")
    assert seen(islice(dataset, 3)) + seen(dataset) == whole


def test_what_would_lose_or_repeat_batches_is_refused(datasets: Datasets) -> None:
    """Two iterations at a time, and persistent workers that had read ahead of a loop that was left."""
    dataset = datasets.open()
    first = iter(dataset)
    next(first)
    iter(dataset)
    with pytest.raises(SpecInvalid, match="one iteration of a dataset at a time"):
        next(first)
    loader = DataLoader(datasets.open(), batch_size=None, num_workers=1, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(SpecInvalid, match="its workers had read ahead"):
        next(iter(loader))


def test_inputs_are_made_in_workers(datasets: Datasets) -> None:
    """With `inputs` the loader gives what the function makes of a batch; the position is known all the same."""
    whole = [batch["tokens"] for batch in datasets.whole("packed")[:6]]
    for workers in (0, 2):
        dataset = datasets.open("packed")
        given = list(islice(dataset.loader(inputs=causal, num_workers=workers), 6))
        assert all(set(each) == {"input_ids", "labels", "worker"} for each in given)
        assert [each["input_ids"].tolist() for each in given] == whole
        assert given[0]["worker"] == (workers > 0)
        assert dataset.step == 6


def causal(batch: dict[str, Any]) -> dict[str, Any]:
    """What a causal language model takes."""
    tokens = batch["tokens"]
    labels = tokens.masked_fill(batch["document"] == 0, -100)
    return {"input_ids": tokens, "labels": labels, "worker": torch.utils.data.get_worker_info() is not None}


@pytest.mark.slow
def test_worker_leaves_inherited_garbage(datasets: Datasets) -> None:
    """A connection to DuckDB that a forked worker collects waits for threads that the worker has not: it crashes."""

    def collect(batch: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        return batch

    garbage: list[Any] = [duckdb.connect(config={"threads": "4"})]
    garbage.append(garbage)
    loader = iter(datasets.open("rows").loader(inputs=collect, num_workers=1))
    del garbage
    assert "dlac" in next(loader)
    gc.collect()


@pytest.mark.slow
def test_spawned_workers_get_it_pickled(datasets: Datasets) -> None:
    """Open files and a position do not prevent pickling. A spawned worker opens the leg itself."""
    dataset = datasets.open("packed")
    next(iter(dataset))
    loader = dataset.loader(num_workers=1, multiprocessing_context="spawn", inputs=causal)
    assert next(iter(loader))["input_ids"].tolist() == datasets.whole("packed")[1]["tokens"]


def test_a_counted_dataset_has_a_length(datasets: Datasets) -> None:
    """The length covers all passes, at any position of the dataset. A streamed dataset has none."""
    dataset = datasets.open()
    next(iter(dataset))
    assert len(dataset) == len(dataset.loader()) == len(datasets.whole("rows")) == 75
    with pytest.raises(TypeError, match="known by reading it only"):
        len(datasets.open("packed"))


def test_worker_errors_reach_reader(tmp_path: Path) -> None:
    """A data file that does not decode, or is gone, ends the loop with the file's name, read by a worker or directly."""
    datasets = Datasets(tmp_path / "home")
    first, second, third = (datasets.open() for _ in range(3))
    (path,) = (datasets.home / "warehouse").glob("src/a/data/*.parquet")
    with path.open("r+b") as stream:
        stream.seek(4)  # the first page of the first row group, after the magic number
        stream.write(b"\xff" * 64)
    with pytest.raises(DataFileUnreadable, match=f"expected row group 0 of .*{re.escape(path.name)}"):
        list(first.loader(num_workers=1))
    path.unlink()
    for batches in (second, third.loader(num_workers=1)):
        with pytest.raises(DataFileUnreadable, match="restore the file"):
            list(batches)
