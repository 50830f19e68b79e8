from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlac_pipeline import training_run
from dlac_pipeline.elastic.ranks.this_process import ThisProcess
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import parse_spec, read_spec
from dlac_pipeline.spec.mesh_spec import MeshSpec
from dlac_pipeline.train.startup import job_spec

GOOD: dict[str, Any] = {
    "run": "r1",
    "source": {"table": "src.t", "columns": ["x"]},
    "order": {"batch_size": 32, "key_groups": 8},
    "launch": {"script": "train.py", "world_size": 2},
}


def with_values(section: str, **values: Any) -> dict[str, Any]:
    """Return the valid spec with some changed values in one section."""
    return {**GOOD, section: {**GOOD.get(section, {}), **values}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**GOOD, "run": "../up"}, r"run: .*'\.\./up'"),
        (
            with_values("order", batchsize=1),
            r"order\.batchsize: unknown field, did you mean 'batch_size'\? \(found 1\)",
        ),
        (with_values("source", table="a..t"), r"source\.table: expected namespace\.table, found 'a\.\.t'"),
        (with_values("launch", deadline_s=0), r"launch\.deadline_s: .*greater than 0 \(found 0\)"),
        (with_values("checkpoint", memory_point_s=0), r"checkpoint\.memory_point_s: .*greater than 0 \(found 0\)"),
        (with_values("order", batch_size=30), r"order: .*batch_size 30 is not a multiple of key_groups 8"),
        (with_values("launch", world_size=3), r"batch_size 32 is not a multiple of world_size 3"),
        (
            with_values("launch", world_size=6, mesh={"tp": 2}),
            r"batch_size 32 is not a multiple of world_size 6 / 2 ranks of a replica",
        ),
        (with_values("launch", tp=2), r"launch\.tp: unknown field, did you mean 'mesh\.tp'\? \("),
        (with_values("launch", world_size=6, mesh={"tp": 4}), r"a multiple of tp \* pp \* cp = 4, .*found 6"),
        (with_values("launch", world_size=4, mesh={"pp": 2, "ep": 4}), r"a multiple of ep = 4, found 4"),
        (with_values("launch", replicas=2, mesh={"cp": 2}), r"expected launch\.replicas without launch\.mesh"),
        (with_values("source", version="b", follow="appends"), r"source: expected a source that follows .*'b'"),
        (with_values("source", transform="a.py:f", nullable=["x"]), r"source: .*beside transform.* nullable = \['x'\]"),
        (
            with_values("sequences", end_token=-1),
            r"sequences\.end_token: expected a name, or a number from 0 .*found -1",
        ),
        ({"run": "r1"}, r"(?s)source: .*order: .*launch: "),
    ],
)
def test_wrong_value_is_named(raw: dict[str, Any], message: str) -> None:
    """The error of an invalid spec has the field's path, the expected value and the value found."""
    with pytest.raises(SpecInvalid, match=message) as caught:
        parse_spec(raw, origin="'job.toml'")
    assert str(caught.value).startswith("'job.toml' is not a valid job spec:")


@pytest.mark.parametrize("blank", ["", "\t\n"])
@pytest.mark.parametrize("where", ["source", "mixture"])
@pytest.mark.parametrize("setting", ["row_filter", "exclude"])
def test_blank_filters_are_refused(setting: str, where: str, blank: str) -> None:
    """The empty value of a template variable selects and excludes no rows, in any source. A dumped spec is read again."""
    more = {setting: ["x > 1", blank] if setting == "exclude" else blank}
    source = {**GOOD["source"], "name": "more", **more}
    raw = {**GOOD, "source": source} if where == "source" else {**GOOD, "mixture": [source]}
    with pytest.raises(SpecInvalid, match=rf"(?s){where}.*{setting}: .*blank"):
        parse_spec(raw, origin="it")
    spec = parse_spec(GOOD, origin="it")
    assert parse_spec(spec.model_dump(), origin="it") == spec
    assert spec.source.planned_filter == ""


def test_home_fills_only_empty_settings(tmp_path: Path) -> None:
    """Catalog, warehouse and store of the spec are kept. Missing ones are in the home folder."""
    spec = parse_spec({**GOOD, "checkpoint": {"store": "/mnt/store"}}, origin="here").resolved(tmp_path)
    assert spec.checkpoint.store == "/mnt/store"
    assert spec.lakehouse.uri == f"sqlite:///{tmp_path.resolve()}/catalog.db"
    assert parse_spec(GOOD, origin="here").resolved(tmp_path).checkpoint.store == str(
        tmp_path.resolve() / "checkpoints"
    )


def test_readers_divide_the_batch() -> None:
    """Ranks that read one share of the batch count once: 64 of them are 32 readers, one for each sample."""
    mesh = parse_spec(with_values("launch", world_size=64, mesh={"tp": 2}), origin="the test").launch.mesh
    assert mesh.readers(64) == 32


def test_ranks_are_numbered_as_torchtitan_does() -> None:
    """Stages are outermost, and tensors innermost. The first rank of each share is on the first stage."""
    mesh = MeshSpec(tp=2, pp=2, cp=1)
    assert [tuple(mesh.coordinates(rank, 8).values()) for rank in range(8)] == [*np.ndindex(2, 2, 1, 2)]
    assert [rank for rank in range(8) if mesh.speaks(rank, 8)] == [0, 2]
    assert [rank for rank in range(8) if mesh.is_last_stage(rank, 8)] == [4, 5, 6, 7]


def test_misfit_ranks_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks by torchrun than can share a batch are reported like any other wrong value of the job spec."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**GOOD, "launch": {"script": "train.py"}}))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SpecInvalid) as caught, training_run(tmp_path / "job.yaml"):
        pass
    message = "spec: batch_size 32 is not a multiple of world_size 3: every rank works on the same number of samples"
    assert str(caught.value) == f"the job spec under WORLD_SIZE=3 is not a valid job spec:\n  {message}"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("checkpoint", {"store_properties": {"a": "b\0"}}),
        ("launch", {"script": "x.py", "args": ["\0"]}),
        ("source", {"table": "s.t", "columns": ["x"], "name": " "}),
    ],
)
def test_text_without_meaning_is_refused(section: str, values: dict[str, Any]) -> None:
    """NUL, blanks and empty tables would have no effect, or fail late. A filter, a token and params may have them."""
    with pytest.raises(SpecInvalid, match=section):
        parse_spec({**GOOD, section: values}, origin="it")
    free = {"params": {"x": "\0"}, "sequences": {"length": 8, "tokenizer": "t.json", "end_token": " "}}
    assert parse_spec({**GOOD, **free}, origin="it").params == {"x": "\0"}


@pytest.mark.parametrize(
    "text",
    ["a: &a [*a]", "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 40))])],
)
def test_multiplied_spec_is_refused(tmp_path: Path, text: str) -> None:
    """A few lines of YAML with aliases stand for more values than anyone waits for."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecInvalid, match="aliases in a circle"):
        read_spec(path)


def test_script_may_pass_its_mesh(tmp_path: Path) -> None:
    """Without a supervisor the mesh of a script takes the place of launch.mesh."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**GOOD, "launch": {"script": "train.py"}}))
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
        found = job_spec(None, tmp_path / "job.yaml", world_size="8", device_mesh=mesh)
    finally:
        torch.distributed.destroy_process_group()
    assert found.launch.mesh == MeshSpec(pp=2, tp=2)


def test_launcher_that_counts_no_node_shares_nothing() -> None:
    """A rank whose launcher does not say how many are on its node takes the values of its share, and no other one's place."""
    for rank in range(4):
        alone = ThisProcess(rank=rank, world_size=4, local_rank=rank, ranks_here=None)
        assert alone.ranks_with_values(of_all_stages=False) == [rank]
    mesh = MeshSpec(tp=2, pp=3)
    takers = [
        ThisProcess(rank=rank, world_size=12, mesh=mesh, local_rank=rank, ranks_here=12).ranks_with_values(
            of_all_stages=False
        )
        for rank in (0, 3, 5)
    ]
    assert takers == [[0, 1, 8, 9], [2, 3, 10, 11], [0, 1, 8, 9]]
