"""Batches for which too few samples are left: `last_batch` in a plain loop, loaders, several ranks, and across a resume."""

import json
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from dlac_pipeline.extensions.dataset import DlacDataset
from dlac_pipeline.lakehouse.errors import ResumeMismatch, SpecInvalid
from tests.integration.datasets import LOADER_WARNINGS, Datasets, rows_of, seen
from tests.integration.test_dataset_state import end, stateful

pytestmark = LOADER_WARNINGS
ROWS = 301
"""Of the table `src.c`: 37 batches of 8, and 5 rows."""


@pytest.fixture
def uneven(datasets: Datasets) -> Datasets:
    """Datasets with a table whose rows do not fill the last batch; no row has the id 0."""
    if not datasets.lakehouse.catalog.table_exists("src.c"):
        rows = rows_of(ROWS, 1)
        text = pa.array([f"row {row}" if row % 5 else None for row in rows["row_id"].to_pylist()])
        datasets.append("src.c", rows.append_column("text", text))
    return datasets


def ids(batches: Iterable[dict[str, Any]]) -> list[int]:
    """The row ids that a plain loop trains on."""
    return [row for batch in batches for row in batch["row_id"].tolist()]


LOADERS: dict[str, Callable[[DlacDataset], Any]] = {
    "dataset": lambda dataset: dataset,
    "plain": lambda dataset: DataLoader(dataset, batch_size=None, num_workers=2),
    "own": lambda dataset: dataset.loader(num_workers=1),
    "stateful": lambda dataset: stateful(dataset, 2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_plain_loop_sees_exactly_the_rows(uneven: Datasets, name: str) -> None:
    """By default every live row is delivered once and nothing else, in a last batch that is shorter."""
    loader = LOADERS[name](uneven.open(table="src.c", passes=1))
    found = list(loader)
    if name == "stateful":
        end(loader)
    assert sorted(ids(found)) == list(range(1, ROWS + 1))
    assert [len(batch["row_id"]) for batch in found] == [8] * 37 + [5]
    assert all(bool(batch["dlac"]["valid"].all()) for batch in found)
    assert found[-1]["dlac"]["rows"] == len(found[-1]["dlac"]["source"]) == 5


def test_last_batch_is_dropped_or_padded(uneven: Datasets) -> None:
    """`drop` delivers full batches only, `pad` marks the zero rows, and `len` counts the delivered batches."""
    wanted = ids(uneven.open(table="src.c", passes=1))
    dropping = uneven.open(table="src.c", passes=1, last_batch="drop")
    assert len(dropping) == 37
    for workers in (0, 2):
        dropping = uneven.open(table="src.c", passes=1, last_batch="drop")
        assert ids(dropping.loader(num_workers=workers)) == wanted[: 37 * 8]
        assert dropping.step == 37
    padding = uneven.open(table="src.c", passes=1, last_batch="pad")
    *_, last = padding
    assert len(padding) == 38
    assert (last["row_id"] != 0).tolist() == last["dlac"]["valid"].tolist()
    assert int(last["dlac"]["valid"].sum()) == 5


@pytest.mark.slow
def test_streamed_batches_hold_samples_only(datasets: Datasets) -> None:
    """Key groups of packed data end apart: every batch without its empty slots, the padded ones else."""
    padded = seen(datasets.open("packed", last_batch="pad"))
    assert not all(all(batch["dlac"]["valid"]) for batch in padded)
    for workers in (0, 2):
        found = seen(datasets.open("packed").loader(num_workers=workers))
        for batch, full in zip(found, padded, strict=True):
            kept = [row for row, valid in zip(full["tokens"], full["dlac"]["valid"], strict=True) if valid]
            assert batch["tokens"] == kept
            assert batch["dlac"]["rows"] == full["dlac"]["rows"] == len(kept)
            assert batch["dlac"]["cursors"] == full["dlac"]["cursors"]
        dropped = seen(datasets.open("packed", last_batch="drop").loader(num_workers=workers))
        assert dropped == [batch for batch in found if batch["dlac"]["rows"] == 8]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_streamed_mixture_has_an_end(datasets: Datasets, world_size: int) -> None:
    """An endless source beside a packed one ends with it, on each rank alone, and with workers that skip batches."""
    mixture = [{"table": "src.b", "columns": ["tokens"], "passes": 0}]
    for workers in (0, 2) if world_size == 1 else (0,):
        dataset = datasets.open("mixed", mixture=mixture, rank=0, world_size=world_size)
        sources = [batch["dlac"]["source"].tolist() for batch in islice(dataset.loader(num_workers=workers), 2_000)]
        assert len(sources) < 2_000
        assert 0 in sources[-1]
        assert any(1 in each for each in sources)


@pytest.mark.parametrize("policy", ["partial", "drop"])
def test_resuming_before_the_last_batch(uneven: Datasets, policy: str) -> None:
    """From the last batches and from the end, as often as it is resumed, at another number of ranks: the rest follows."""
    whole = seen(uneven.open(table="src.c", passes=1, last_batch=policy))
    for cut in (36, 37, 38)[: len(whole) - 35]:
        dataset = uneven.open(table="src.c", passes=1, last_batch=policy)
        for _ in islice(dataset, cut):
            pass
        state = json.loads(json.dumps(dataset.state_dict()))
        again = uneven.open(table="src.c", passes=1, last_batch=policy, state=state)
        assert seen(again) == whole[cut:]
        assert seen(again) == []
        parts = [
            seen(uneven.open(table="src.c", passes=1, last_batch=policy, state=state, rank=rank, world_size=2))
            for rank in range(2)
        ]
        both = [[*left["row_id"], *right["row_id"]] for left, right in zip(*parts, strict=True)]
        assert both == [batch["row_id"] for batch in whole[cut:]]


def test_state_binds_last_batch(uneven: Datasets) -> None:
    """A state that was read with another `last_batch` is refused by name; other values are refused when opening."""
    state = uneven.open(table="src.c", passes=1, last_batch="drop").state_dict()
    with pytest.raises(ResumeMismatch, match="  last_batch: saved 'drop', asked for 'partial'"):
        uneven.open(table="src.c", passes=1, state=state)
    with pytest.raises(SpecInvalid, match=r"last_batch to be one of \('partial', 'drop', 'pad'\), found 'dorp'"):
        uneven.open(last_batch="dorp")
    with pytest.raises(SpecInvalid, match="would leave none"):
        uneven.open(table="src.c", passes=1, row_filter="row_id < 5", last_batch="drop")
