"""The PyTorch dataset: whichever way it is read, the batches, and the state behind them, are the same."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from catalog.connect import LakehouseConfig, connect
from catalog.errors import DataFileUnreadable, DlacError, FormatTooNew, ResumeMismatch, SpecInvalid
from dlac_pipeline.dataset import DlacDataset, as_batch, merge_states, open_dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
Seen = list[dict[str, Any]]
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
class Lake:
    """Two tables, and datasets over them."""

    home: Path
    opened: dict[str, Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lakehouse = connect(LakehouseConfig().at_home(self.home))
        self.lakehouse.create_namespace("src")
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


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The lakehouse of this module; a test that changes a table makes one of its own."""
    return Lake(tmp_path_factory.mktemp("dataset") / "home")


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


def stateful(dataset: DlacDataset, workers: int) -> Any:
    """A StatefulDataLoader over a dataset."""
    torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_gives_the_same_batches(lake: Lake, kind: str) -> None:
    """Order, content, cursors and counts are those of reading without workers, in a plain DataLoader and in the dataset's own."""
    whole = lake.whole(kind)
    assert [batch["dlac"]["step"] for batch in whole] == list(range(1, len(whole) + 1))
    for workers in (0, 1, 3) if kind in ("rows", "packed") else (2,):
        assert seen(DataLoader(lake.open(kind), batch_size=None, num_workers=workers)) == whole
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}
    assert seen(lake.open(kind).loader(**options)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_the_same_whichever_way_it_was_read(lake: Lake, kind: str) -> None:
    """Behind 7 batches read directly, by loaders with workers, and by a StatefulDataLoader it is the same few bytes of JSON."""
    direct = lake.open(kind)
    for _ in islice(direct, 7):
        pass
    state = direct.state_dict()
    assert len(json.dumps(state)) < 4096
    for workers in (0, 3):
        own, plain_loader, torchdata = lake.open(kind), lake.open(kind), lake.open(kind)
        for _ in islice(own.loader(num_workers=workers), 7):
            pass
        for dataset, loader in (
            (plain_loader, DataLoader(plain_loader, batch_size=None, num_workers=workers)),
            (torchdata, stateful(torchdata, workers)),
        ):
            for batch in islice(loader, 7):
                dataset.observe(batch)
        assert own.state_dict() == plain_loader.state_dict() == torchdata.state_dict() == state


@pytest.mark.parametrize(
    "kind", [kind if kind in ("rows", "packed") else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]
)
def test_resuming_gives_what_was_not_consumed(lake: Lake, kind: str) -> None:
    """From any state, in the first pass or a later one, the rest follows; resuming twice gives the same."""
    whole = lake.whole(kind)
    for cut in (0, 5, len(whole) // 2 + 1, len(whole) - 1, len(whole)):
        dataset = lake.open(kind)
        for _ in islice(dataset.loader(num_workers=2), cut):
            pass
        state = json.loads(json.dumps(dataset.state_dict()))
        assert state["step"] == cut
        kept = copy.deepcopy(state)
        again = lake.open(kind, state=state)
        assert seen(again) == whole[cut:]
        again.load_state_dict(state)
        assert seen(again.loader(num_workers=3)) == whole[cut:]
        assert state == kept
        assert seen(again) == []


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("rows", 3),
        ("packed", 1),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("rows", 0), ("packed", 2), ("mixed", 3))),
    ],
)
def test_a_stateful_data_loader_resumes_by_its_own_state(lake: Lake, kind: str, workers: int) -> None:
    """What each worker had read ahead is read again, and its turns go on where they were, however often it is resumed."""
    whole = lake.whole(kind)
    for cuts in ((0,), (2, 1, 3), (5, 4), (len(whole) - 1,), (len(whole),)):
        state, found = None, []
        for cut in cuts:
            loader = stateful(lake.open(kind), workers)
            if state is not None:
                loader.load_state_dict(state)
            found += seen(islice(loader, cut))
            state = loader.state_dict()
        loader = stateful(lake.open(kind), workers)
        loader.load_state_dict(state)
        assert found + seen(loader) == whole


def test_a_stateful_data_loader_keeps_its_number_of_workers(lake: Lake) -> None:
    """The state of one of two workers is refused where there are none; the dataset's own state fits anywhere."""
    loader = stateful(lake.open(), 2)
    next(iter(loader))
    worker = loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    assert worker["worker"] == {"base": 0, "of": 2}
    with pytest.raises(ResumeMismatch, match="one of 2 workers into such a worker, found none"):
        lake.open(state=worker)


def test_the_position_is_the_last_batch_that_was_handed_out(lake: Lake) -> None:
    """Before the first batch it is the beginning; a batch counts once it is handed out, and nothing counts that is read ahead."""
    for workers in (0, 2):
        dataset = lake.open()
        loader = iter(dataset.loader(num_workers=workers))
        assert dataset.step == dataset.state_dict()["step"] == 0
        for step in (1, 2, 3):
            batch = next(loader)
            assert batch["dlac"]["step"] == dataset.step == dataset.state_dict()["step"] == step


def test_a_consumer_that_reads_ahead_says_what_it_is_done_with(lake: Lake) -> None:
    """`observe` puts the position behind the batch whose step is done, though the next one was handed out already."""
    for workers in (0, 2):
        dataset = lake.open("packed")
        loader = iter(DataLoader(dataset, batch_size=None, num_workers=workers))
        batches = [next(loader) for _ in range(4)]
        dataset.observe(batches[2])
        assert dataset.step == 3
        assert seen(lake.open("packed", state=dataset.state_dict())) == lake.whole("packed")[3:]


def test_iterating_again_goes_on_where_the_consumer_stands(lake: Lake) -> None:
    """A loop that was left is gone on with, persistent workers or not; behind the last pass nothing follows."""
    whole = lake.whole("packed")
    every: tuple[dict[str, Any], ...] = (
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
    )
    for options in every:
        dataset = lake.open("packed")
        loader = dataset.loader(**options)
        found = seen(islice(loader, 5)) + seen(islice(loader, 1)) + seen(loader)
        assert found == whole
        assert seen(loader) == []
    dataset = lake.open("packed")
    assert seen(islice(dataset, 3)) + seen(dataset) == whole


def test_what_would_lose_or_repeat_batches_is_refused(lake: Lake) -> None:
    """Two iterations at a time, and persistent workers that had read ahead of a loop that was left."""
    dataset = lake.open()
    first = iter(dataset)
    next(first)
    iter(dataset)
    with pytest.raises(SpecInvalid, match="one iteration of a dataset at a time"):
        next(first)
    loader = DataLoader(lake.open(), batch_size=None, num_workers=1, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(SpecInvalid, match="its workers had read ahead"):
        next(iter(loader))


def ranks(lake: Lake, kind: str, world_size: int, steps: int, state: Any = None) -> tuple[list[Any], list[Any]]:
    """The next `steps` global batches' samples as `world_size` ranks read them, each alone, and the ranks' states behind them."""
    name = "row_id" if kind in ("rows", "filtered", "transformed") else "tokens"
    parts, states = [], []
    for rank in range(world_size):
        dataset = lake.open(kind, rank=rank, world_size=world_size, state=state)
        parts.append([batch[name].tolist() for batch in islice(dataset, steps)])
        states.append(dataset.state_dict())
    return [list(chain(*each)) for each in zip(*parts, strict=True)], states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [(4, 8, 2), *(pytest.param(sizes, marks=pytest.mark.soak) for sizes in ((1, 2, 4), (8, 1)))]
)
def test_a_state_loads_at_another_world_size(lake: Lake, kind: str, sizes: tuple[int, ...]) -> None:
    """Counted states load as they are, streamed ones merged; the global batches stay the same, also of shared key groups."""
    (expected, _), state, found = ranks(lake, kind, 1, 12), None, []
    for world_size in sizes:
        part, states = ranks(lake, kind, world_size, 4, state)
        state = merge_states(states) if kind not in ("rows", "filtered") else states[-1]
        found += part
    assert found == expected[: len(found)]
    assert state == merge_states([state or {}])


def test_a_rank_alone_counts_for_itself(lake: Lake) -> None:
    """Without a process group a streamed batch's mean is that of the rank's own samples; a counted one's the global share."""
    batch = as_batch(next(iter(lake.open("packed", rank=1, world_size=2))))
    assert (batch.rows, batch.world_size, batch["tokens"].shape) == (4, 1, (4, 16))
    assert batch.mean(torch.ones(4)) == 1
    batch = as_batch(next(iter(lake.open("rows", rank=1, world_size=2))))
    assert (batch.rows, batch.world_size) == (8, 2)
    assert batch.mean(torch.ones(4)) == 1


CHANGES: dict[str, dict[str, Any]] = {
    "table_uuid": {"table": "src.b"},
    "seed": {"seed": 5},
    "batch_size": {"batch_size": 16},
    "key_groups": {"key_groups": 8},
    "columns": {"columns": ["tokens"]},
    "row_filter": {"row_filter": "row_id > 3"},
    "passes": {"passes": 3},
    "shuffle": {"shuffle": False},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_something_else_is_refused(lake: Lake, name: str) -> None:
    """A state of another table or other settings does not load; the message names what differs, with both values."""
    state = lake.open().state_dict()
    for load in (
        lambda: lake.open(**CHANGES[name], state=state),
        lambda: lake.open(**CHANGES[name]).load_state_dict(state),
    ):
        with pytest.raises(ResumeMismatch, match=f"  {name}: saved .*, asked for "):
            load()


def test_a_state_that_is_damaged_or_partial_is_refused(lake: Lake) -> None:
    """An altered leg, a newer version, another rank's cursors, and parts that do not belong together."""
    state = lake.open().state_dict()
    wrong: list[tuple[type[DlacError], str, Callable[[], Any]]] = [
        (FormatTooNew, "version 2", lambda: lake.open(state={**state, "format_version": 2})),
        (ResumeMismatch, "altered", lambda: lake.open(state={**state, "leg": {**state["leg"], "digest": "0"}})),
        (SpecInvalid, "found .*No such file", lambda: lake.open(state=lake.home / "none.json")),
        (ResumeMismatch, "one step and leg", lambda: merge_states([state, {**state, "step": 3}])),
    ]
    parts = [lake.open("packed", rank=rank, world_size=4).state_dict() for rank in range(4)]
    other = {**parts[0], "cursors": {"0": [[0, 0, 1, 0]]}}
    wrong += [
        (ResumeMismatch, r"key groups \[2\]", lambda: lake.open("packed", rank=2, world_size=4, state=parts[1])),
        (ResumeMismatch, r"none with key groups \['1', '3'\]", lambda: merge_states([parts[0], parts[2]])),
        (ResumeMismatch, "one cursor of key group 0", lambda: merge_states([parts[0], other])),
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()


def test_a_state_holds_its_snapshot(tmp_path: Path) -> None:
    """After appends, deletes and an overwrite the rest of the planned snapshot follows; naming another snapshot is refused."""
    lake = Lake(tmp_path / "home")
    whole, dataset = lake.whole("packed"), lake.open("packed")
    for _ in islice(dataset.loader(num_workers=2), 9):
        pass
    state = dataset.state_dict()
    lake.append("src.a", rows_of(100, 300))
    lake.lakehouse.load("src.a").delete("row_id < 250")
    assert seen(lake.open("packed", state=state)) == whole[9:]
    changed = lake.open("packed")
    assert len(seen(changed)) != len(whole)
    changed.load_state_dict(state)
    assert seen(changed.loader(num_workers=1)) == whole[9:]
    snapshot = lake.lakehouse.load("src.a").metadata.current_snapshot_id
    with pytest.raises(ResumeMismatch, match=f"  snapshot_id: saved .*, asked for {snapshot}"):
        lake.open("packed", snapshot_id=snapshot, state=state)


def test_settings_are_checked(lake: Lake, tmp_path: Path) -> None:
    """Unknown settings, a spec beside settings, ranks that do not fit, and sources that are followed."""
    path = tmp_path / "job.yaml"
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("expected settings of .*'batch_size'.*, found 'batchsize'", lambda: lake.open(batchsize=8)),
        ("batch_size 8 is not a multiple of key_groups 3", lambda: lake.open(key_groups=3)),
        ("found both: \\['table'\\]", lambda: open_dataset(path, table="src.a")),
        ("found rank 2 of 2", lambda: lake.open(rank=2, world_size=2)),
        ("found rank 0 of 3", lambda: lake.open(rank=0, world_size=3)),
        ('found "appends"', lambda: lake.open(follow="appends")),
        ("of other names than 'dlac'", lambda: next(iter(lake.open(transform="named")))),
    ]
    for message, call in wrong:
        with pytest.raises(SpecInvalid, match=message):
            call()


def test_a_job_spec_opens_the_same_dataset(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, a parsed spec and single settings; lakehouse, home folder, rank and world size may come from anywhere."""
    path = tmp_path / "job.json.yaml"
    job = {
        "run": "r",
        "source": {"table": "src.a", "columns": ["row_id"]},
        "order": {"batch_size": 8, "key_groups": 4, "passes": 2},
        "launch": {"script": "train.py"},
    }
    path.write_text(json.dumps(job))
    monkeypatch.setenv("DLAC_HOME", str(lake.home))
    by_path = open_dataset(path)
    assert seen(by_path) == lake.whole("rows")
    settings: dict[str, Any] = {"table": "src.a", "columns": ["row_id"], "batch_size": 8, "key_groups": 4, "passes": 2}
    monkeypatch.delenv("DLAC_HOME")
    for where in (lake.lakehouse, lake.lakehouse.config):
        assert seen(open_dataset(lakehouse=where, **settings)) == lake.whole("rows")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = open_dataset(by_path.spec)
    assert (dataset.rank, dataset.world_size, dataset.key_groups) == (1, 4, range(1, 2))
    assert next(iter(dataset))["row_id"].tolist() == lake.whole("rows")[0]["row_id"][2:4]


def test_a_counted_dataset_has_a_length(lake: Lake) -> None:
    """It is that of all passes, wherever the dataset stands; a streamed one has none."""
    dataset = lake.open()
    next(iter(dataset))
    assert len(dataset) == len(dataset.loader()) == len(lake.whole("rows")) == 75
    with pytest.raises(TypeError, match="known by reading it only"):
        len(lake.open("packed"))


def test_inputs_are_made_in_the_workers_and_handed_out_alone(lake: Lake) -> None:
    """With `inputs` the loader gives what the function makes of a batch; the position is known all the same."""
    for workers in (0, 2):
        dataset = lake.open("packed")
        given = list(islice(dataset.loader(inputs=causal, num_workers=workers), 6))
        assert all(set(each) == {"input_ids", "labels", "worker"} for each in given)
        assert [each["input_ids"].tolist() for each in given] == [each["tokens"] for each in lake.whole("packed")[:6]]
        assert given[0]["worker"] == (workers > 0)
        assert dataset.step == 6


def causal(batch: dict[str, Any]) -> dict[str, Any]:
    """What a causal language model takes."""
    tokens = batch["tokens"]
    labels = tokens.masked_fill(batch["document"] == 0, -100)
    return {"input_ids": tokens, "labels": labels, "worker": torch.utils.data.get_worker_info() is not None}


def test_pinning_reaches_every_tensor(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DataLoader's pin_memory does to a batch leaves no tensor of it out, and the rest as it was."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *args: self + 1000)
    batch = next(iter(lake.open("packed")))
    pinning: Any = torch.utils.data._utils.pin_memory
    pinned = pinning.pin_memory(batch)
    for name in ("tokens", "document", "position"):
        assert torch.equal(pinned[name], batch[name] + 1000)
    for name in ("source", "cursors"):
        assert torch.equal(pinned["dlac"][name], batch["dlac"][name] + 1000)
    assert pinned["dlac"]["step"] == 1


def test_spawned_workers_get_it_pickled(lake: Lake) -> None:
    """Neither open files nor a position of its own stand in the way of pickling; a spawned worker opens the leg itself."""
    dataset = lake.open("packed")
    next(iter(dataset))
    loader = dataset.loader(num_workers=1, multiprocessing_context="spawn", inputs=causal)
    assert next(iter(loader))["input_ids"].tolist() == lake.whole("packed")[1]["tokens"]


def test_importing_it_needs_neither_deepspeed_nor_dagster() -> None:
    """In a fresh interpreter; transformers and torchdata are not imported either."""
    heavy = {"deepspeed", "dagster", "transformers", "accelerate", "torchdata"}
    code = f"import sys, dlac_pipeline; dlac_pipeline.open_dataset; print(sorted({heavy!r} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_errors_of_workers_are_raised_where_the_batches_are_read(tmp_path: Path) -> None:
    """A data file that is gone ends the loop with the file's name, whether a worker or this process reads it."""
    lake = Lake(tmp_path / "home")
    datasets: Iterator[DlacDataset] = (lake.open() for _ in range(2))
    first, second = next(datasets), next(datasets)
    for path in (lake.home / "warehouse").glob("src/a/data/*.parquet"):
        path.unlink()
    with pytest.raises(DataFileUnreadable, match="restore the file"):
        list(first)
    with pytest.raises(RuntimeError, match="restore the file"):
        list(second.loader(num_workers=1))
