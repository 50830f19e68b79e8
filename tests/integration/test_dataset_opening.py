"""Opening the PyTorch dataset: from settings or a job spec, on any rank."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlac_pipeline.extensions.dataset import as_batch, open_dataset
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.slots import DataCoordinate
from tests.integration.datasets import Datasets, seen
from tests.small_records import raw_spec


def test_settings_are_checked(datasets: Datasets, tmp_path: Path) -> None:
    """Unknown settings, a spec beside settings, ranks that do not fit, and sources that are followed."""
    path = tmp_path / "job.yaml"
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("expected settings of .*'batch_size'.*, found 'batchsize'", lambda: datasets.open(batchsize=8)),
        ("batch_size 8 is not a multiple of key_groups 3", lambda: datasets.open(key_groups=3)),
        ("found both: \\['table'\\]", lambda: open_dataset(path, table="src.a")),
        ("found rank 2 of 2", lambda: datasets.open(rank=2, world_size=2)),
        ("beside begin_token, .*'<s>'.* the number of the token", lambda: datasets.open("packed", begin_token="<s>")),
        ('found "appends"', lambda: datasets.open(follow="appends")),
        ("of other names than 'dlac'", lambda: next(iter(datasets.open(transform="named")))),
    ]
    for message, call in wrong:
        with pytest.raises(SpecInvalid, match=message):
            call()


def test_a_job_spec_opens_the_same_dataset(datasets: Datasets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, a parsed spec and single settings; lakehouse, home folder, rank and world size may come from anywhere."""
    path = tmp_path / "job.json.yaml"
    order = {"batch_size": 8, "key_groups": 4, "passes": 2}
    path.write_text(json.dumps(raw_spec(source={"table": "src.a", "columns": ["row_id"]}, order=order)))
    monkeypatch.setenv("DLAC_HOME", str(datasets.home))
    by_path = open_dataset(path)
    assert seen(by_path) == datasets.whole("rows")
    settings: dict[str, Any] = {"table": "src.a", "columns": ["row_id"], **order}
    monkeypatch.delenv("DLAC_HOME")
    for where in (datasets.lakehouse, datasets.lakehouse.config):
        assert seen(open_dataset(lakehouse=where, **settings)) == datasets.whole("rows")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = open_dataset(by_path.spec)
    assert (dataset.coordinate, dataset.key_groups) == (DataCoordinate(1, 4), range(1, 2))
    assert next(iter(dataset))["row_id"].tolist() == datasets.whole("rows")[0]["row_id"][2:4]


def test_stale_variables_are_logged(
    datasets: Datasets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that the environment chose is a warning, which names the way to read all rows. A named one is none."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    datasets.open("rows")
    assert "share of rank 1 of 4" in caplog.text
    assert "pass rank=0 and world_size=1 to read all rows" in caplog.text
    caplog.clear()
    assert len(next(iter(datasets.open("rows", rank=0, world_size=1)))["row_id"]) == 8
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    datasets.open("rows")
    assert not caplog.records


def test_shared_readers_name_their_share(datasets: Datasets) -> None:
    """Under torch.distributed ranks with one share would read different rows, so that the share has to be named."""
    torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(SpecInvalid, match=r"2 ranks of 'tp' in the mesh .* read one"):
            datasets.open("rows")
        dp = mesh["dp"]
        found = datasets.open("rows", rank=dp.get_local_rank(), world_size=dp.size())
        assert found.coordinate == DataCoordinate(1, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_alone_counts_for_itself(datasets: Datasets) -> None:
    """Without a process group a streamed batch's mean covers the rank's samples; a counted one's is the global share."""
    batch = as_batch(next(iter(datasets.open("packed", rank=1, world_size=2))))
    assert (batch.rows, batch.readers, batch["tokens"].shape) == (4, 1, (4, 16))
    assert batch.mean(torch.ones(4)) == 1
    batch = as_batch(next(iter(datasets.open("rows", rank=1, world_size=2))))
    assert (batch.rows, batch.readers) == (8, 2)
    assert batch.mean(torch.ones(4)) == 1
