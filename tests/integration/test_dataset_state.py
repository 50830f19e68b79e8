"""The state of the PyTorch dataset is the same for every way of reading, and resumes in every way."""

import copy
import json
from collections.abc import Callable
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dlac_pipeline.extensions.dataset import DlacDataset, merge_states
from dlac_pipeline.lakehouse.errors import DlacError, FormatTooNew, ResumeMismatch, SpecInvalid
from tests.integration.datasets import KINDS, LOADER_WARNINGS, Datasets, rows_of, seen, some_kinds

pytestmark = LOADER_WARNINGS


def stateful(dataset: DlacDataset, workers: int) -> Any:
    """A StatefulDataLoader over a dataset."""
    torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)


def end(loader: Any) -> None:
    """End a StatefulDataLoader's workers. The garbage collector waits 5 s for each worker that it finds."""
    if loader.num_workers and loader._iterator is not None:
        loader._iterator._shutdown_workers()


@pytest.mark.slow
@pytest.mark.parametrize("kind", some_kinds("rows", "mixed"))
def test_state_is_equal_for_every_loader(datasets: Datasets, kind: str) -> None:
    """After 7 batches, read directly, by loaders with workers or by a StatefulDataLoader, the state is the same small JSON."""
    direct = datasets.open(kind)
    for _ in islice(direct, 7):
        pass
    state = direct.state_dict()
    assert len(json.dumps(state)) < 4096
    for workers in (0, 3):
        own, plain_loader, torchdata = datasets.open(kind), datasets.open(kind), datasets.open(kind)
        for _ in islice(own.loader(num_workers=workers), 7):
            pass
        theirs = stateful(torchdata, workers)
        for dataset, loader in (
            (plain_loader, DataLoader(plain_loader, batch_size=None, num_workers=workers)),
            (torchdata, theirs),
        ):
            for batch in islice(loader, 7):
                dataset.observe(batch)
        end(theirs)
        assert own.state_dict() == plain_loader.state_dict() == torchdata.state_dict() == state


@pytest.mark.parametrize("kind", some_kinds("packed"))
def test_resuming_gives_what_was_not_consumed(datasets: Datasets, kind: str) -> None:
    """From any state, in the first pass or a later one, the rest follows; resuming twice gives the same."""
    whole = datasets.whole(kind)
    for cut in (len(whole) // 2 + 1, len(whole)):
        dataset = datasets.open(kind)
        for _ in islice(dataset.loader(num_workers=2), cut):
            pass
        state = json.loads(json.dumps(dataset.state_dict()))
        assert state["step"] == cut
        kept = copy.deepcopy(state)
        again = datasets.open(kind, state=state)
        assert seen(again) == whole[cut:]
        again.load_state_dict(state)
        assert seen(again.loader(num_workers=1)) == whole[cut:]
        assert state == kept
        assert seen(again) == []


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("rows", 2, marks=pytest.mark.slow),
        pytest.param("packed", 1, marks=pytest.mark.soak),
        pytest.param("mixed", 3, marks=pytest.mark.soak),
    ],
)
def test_stateful_loader_resumes_by_its_state(datasets: Datasets, kind: str, workers: int) -> None:
    """Batches that each worker had read ahead are read again, and its turns continue, however often it is resumed."""
    whole = datasets.whole(kind)
    for cuts in ((0, 3, len(whole) - 4), (len(whole),)):
        state, found = None, []
        for cut in cuts:
            loader = stateful(datasets.open(kind), workers)
            if state is not None:
                loader.load_state_dict(state)
            found += seen(islice(loader, cut))
            state = loader.state_dict()
            end(loader)
        loader = stateful(datasets.open(kind), workers)
        loader.load_state_dict(state)
        assert found + seen(loader) == whole


@pytest.mark.slow
def test_stateful_loader_keeps_worker_count(datasets: Datasets) -> None:
    """The state of one of two workers is refused where there are none; the dataset's own state fits anywhere."""
    loader = stateful(datasets.open(), 2)
    next(iter(loader))
    worker = loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    end(loader)
    assert worker["worker"] == {"base": 0, "of": 2}
    with pytest.raises(ResumeMismatch, match="one of 2 workers into such a worker, found none"):
        datasets.open(state=worker)


def ranks(datasets: Datasets, kind: str, world_size: int, steps: int, state: Any = None) -> tuple[list[Any], list[Any]]:
    """Return the samples of the next `steps` global batches, as `world_size` ranks read them, and the ranks' states then."""
    name = "row_id" if kind in ("rows", "filtered", "transformed") else "tokens"
    parts, states = [], []
    for rank in range(world_size):
        dataset = datasets.open(kind, rank=rank, world_size=world_size, state=state)
        parts.append([batch[name].tolist() for batch in islice(dataset, steps)])
        states.append(dataset.state_dict())
    return [list(chain(*each)) for each in zip(*parts, strict=True)], states


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mixed", (4, 8, 2)),
        *(
            pytest.param(kind, sizes, marks=pytest.mark.soak)
            for kind, sizes in product(KINDS, ((4, 8, 2), (1, 2, 4), (8, 1)))
            if (kind, sizes) != ("mixed", (4, 8, 2))
        ),
    ],
)
def test_a_state_loads_at_another_world_size(datasets: Datasets, kind: str, sizes: tuple[int, ...]) -> None:
    """Counted states load as they are, streamed ones merged; the global batches stay the same, also of shared key groups."""
    (expected, _), state, found = ranks(datasets, kind, 1, 12), None, []
    for world_size in sizes:
        part, states = ranks(datasets, kind, world_size, 4, state)
        state = merge_states(states) if kind not in ("rows", "filtered") else states[-1]
        found += part
    assert found == expected[: len(found)]
    assert state == merge_states([state or {}])


CHANGES: dict[str, dict[str, Any]] = {
    "table_uuid": {"table": "src.b"},
    "seed": {"seed": 5},
    "key_groups": {"key_groups": 8},
    "row_filter": {"row_filter": "row_id > 3"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_something_else_is_refused(datasets: Datasets, name: str) -> None:
    """A state of another table or other settings does not load; the message names what differs, with both values."""
    state = datasets.open().state_dict()
    with pytest.raises(ResumeMismatch, match=f"  {name}: saved .*, asked for "):
        datasets.open(**CHANGES[name], state=state)
    with pytest.raises(ResumeMismatch, match=f"  {name}: saved .*, asked for "):
        datasets.open(**CHANGES[name]).load_state_dict(state)


def as_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """A state as DLAC wrote it before version 2."""
    kept = {name: value for name, value in state.items() if name not in ("digest", "last_batch")}
    return {**kept, "format_version": 1}


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_state_of_version_1_loads(datasets: Datasets, kind: str) -> None:
    """States without a digest and without `last_batch` resume where they stand, whatever `last_batch` is asked for."""
    whole, dataset = datasets.whole(kind), datasets.open(kind)
    for _ in islice(dataset, 4):
        pass
    old = as_version_1(dataset.state_dict())
    assert seen(datasets.open(kind, state=old)) == whole[4:]
    assert seen(datasets.open(kind, state=merge_states([old]), last_batch="pad"))[0] == whole[4]


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    """A state that lacks a key."""
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_state_without_a_key_is_refused(datasets: Datasets, kind: str) -> None:
    """Each key of a state is needed, and the message names the missing key."""
    state = datasets.open(kind).state_dict()
    for key in without(state, "format_version"):
        with pytest.raises(ResumeMismatch, match=rf"dataset's state with \['{key}'\]"):
            datasets.open(kind, state=without(state, key))
    with pytest.raises(ResumeMismatch, match="its leg as JSON text, found None"):
        datasets.open(kind, state={**state, "leg": None})


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_altered_position_is_refused(datasets: Datasets, kind: str) -> None:
    """A digest covers step, cursors and `last_batch`; loading the unaltered state afterwards still works."""
    dataset = datasets.open(kind)
    next(iter(dataset))
    state = dataset.state_dict()
    cursors = {group: [[0, 0, 3, 0]] for group in map(str, range(4))}
    for change in ({"step": 2}, {"step": 10**9}, {"cursors": cursors}, {"last_batch": "drop"}, {"extra": 1}):
        with pytest.raises(ResumeMismatch, match=r"with the digest .* it was altered"):
            dataset.load_state_dict({**state, **change})
    dataset.load_state_dict(json.loads(json.dumps(state)))
    assert dataset.step == 1


CURSORS: list[Any] = [{"0": [[0, 0, 10**9, 0]]}, {"0": [[0, 0, "1", 0]]}, {"0": []}, {"9": [[0, 0, 0, 0]]}, None]


def test_impossible_cursors_are_refused(datasets: Datasets) -> None:
    """Without a digest to look at (version 1) cursors outside the plan are named."""
    old = as_version_1(datasets.open("packed").state_dict())
    for cursors in CURSORS:
        changed = cursors if cursors is None else {**old["cursors"], **cursors}
        with pytest.raises(ResumeMismatch, match=r"expected a dataset's state with cursors"):
            datasets.open("packed", state={**old, "cursors": changed})
    counted = as_version_1(datasets.open().state_dict())
    with pytest.raises(ResumeMismatch, match="expected a dataset's state without cursors"):
        datasets.open(state={**counted, "cursors": old["cursors"]})


def test_damaged_state_is_refused(datasets: Datasets) -> None:
    """An altered leg or step, a newer version, another rank's cursors, and parts that do not belong together."""
    state = datasets.open().state_dict()
    wrong: list[tuple[type[DlacError], str, Callable[[], Any]]] = [
        (FormatTooNew, "version 3", lambda: datasets.open(state={**state, "format_version": 3})),
        (ResumeMismatch, "altered", lambda: datasets.open(state={**state, "leg": {**state["leg"], "digest": "0"}})),
        (SpecInvalid, "found .*No such file", lambda: datasets.open(state=datasets.home / "none.json")),
        (SpecInvalid, r"a dataset's state_dict\(\) returned", lambda: datasets.open(state={"_snapshot": {}})),
        (ResumeMismatch, "a step of 0 to 75", lambda: datasets.open(state={**as_version_1(state), "step": 76})),
        (ResumeMismatch, "one step and leg", lambda: merge_states([state, {**as_version_1(state), "step": 3}])),
        (ResumeMismatch, "one step and leg", lambda: merge_states([])),
    ]
    parts = [datasets.open("packed", rank=rank, world_size=4).state_dict() for rank in range(4)]
    read_on = datasets.open("packed", rank=0, world_size=4)
    next(iter(read_on))
    other = {**as_version_1(read_on.state_dict()), "step": 0}
    old = as_version_1(parts[0])
    wrong += [
        (ResumeMismatch, r"key groups \[2\]", lambda: datasets.open("packed", rank=2, world_size=4, state=parts[1])),
        (ResumeMismatch, r"none with key groups \['1', '3'\]", lambda: merge_states([parts[0], parts[2]])),
        (ResumeMismatch, "one cursor of key group 0", lambda: merge_states([old, other])),
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()


def test_a_state_holds_its_snapshot(tmp_path: Path) -> None:
    """After appends, deletes and an overwrite the rest of the planned snapshot follows; naming another snapshot is refused."""
    datasets = Datasets(tmp_path / "home")
    whole, dataset = datasets.whole("packed"), datasets.open("packed")
    for _ in islice(dataset.loader(num_workers=2), 9):
        pass
    state = dataset.state_dict()
    datasets.append("src.a", rows_of(100, 300))
    datasets.lakehouse.load("src.a").delete("row_id < 250")
    assert seen(datasets.open("packed", state=state)) == whole[9:]
    changed = datasets.open("packed")
    assert len(seen(changed)) != len(whole)
    changed.load_state_dict(state)
    assert seen(changed.loader(num_workers=1)) == whole[9:]
    snapshot = datasets.lakehouse.load("src.a").metadata.current_snapshot_id
    with pytest.raises(ResumeMismatch, match=f"  snapshot_id: saved .*, asked for {snapshot}"):
        datasets.open("packed", version=snapshot, state=state)
