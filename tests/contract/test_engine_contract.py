"""The door of engines: the core's, extensions', and one of another author that a folder brings, keep one contract."""

import sys
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.engines import adapt, engine_named
from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.exchange.export import export_weights
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.extensions.exchange.fork import adopt_checkpoint
from dlac_pipeline.extensions.exchange.weights import state_of, weights_of
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles
from dlac_pipeline.lakehouse.errors import BadInput, CheckpointError, SpecInvalid
from tests.conftest import PROGRAMS, Arena
from tests.engine_ranks import assert_same, save
from tests.installed import install_distribution

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

POINTS = ["tiny = tiny_engine:TinyState", "lost = lost_engine:LostState [lost]"]


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with two engines: `tiny`, and `lost`, whose package is missing."""
    (folder := tmp_path / "site").mkdir()
    modules = {
        "tiny_engine": (PROGRAMS / "tiny_engine.py").read_text(),
        "lost_engine": "import a_package_that_is_missing",
    }
    install_distribution(folder, "tiny-engines", modules, {"dlac.engines": POINTS})
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _parts(seed: int, steps: int = 0) -> dict[str, Any]:
    """Return a model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _engine(name: str, parts: dict[str, Any]) -> Engine:
    """Return the engine of a name, or the one of replica groups, for these parts."""
    if name == "replicas":
        group: Engine = dlac.TorchFTState(**parts)
        return group
    if name != "files":
        return adapt(None, name, **parts)

    def write(folder: Path) -> None:
        torch.save({part: each.state_dict() for part, each in parts.items()}, folder / "own.pt")

    def read(folder: Path) -> None:
        saved = torch.load(folder / "own.pt", weights_only=True)
        for part, each in parts.items():
            each.load_state_dict(saved[part])

    return TrainerFiles(write, read, modules={"model": parts["model"]})


def _state(parts: dict[str, Any]) -> str:
    return pformat([dict(each.state_dict()) for each in parts.values()])  # dicts sorted


ENGINES = ["torch", "dcp", "files", "replicas", "tiny"]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("writing", ["direct", "copies"])
def test_state_of_save_is_loaded(tmp_path: Path, name: str, writing: str) -> None:
    """A load gives the state of the save, whatever training did since, and the recorded name finds the engine's class."""
    saved, loaded = _parts(1, steps=3), _parts(2)
    (folder := tmp_path / "checkpoint").mkdir()
    writer = Direct() if writing == "direct" else Copies(CopyMemory())
    engine, expected = _engine(name, saved), _state(saved)
    engine.save(folder, writer.write)
    writer.handed_over()
    with torch.no_grad():
        saved["model"][0].weight.zero_()
    writer.finish()
    assert engine.conversion(1) is None
    _engine(name, loaded).load(folder, saved_world_size=1)
    assert _state(loaded) == expected
    assert engine.step_applied()
    assert engine.modules()["model"] is saved["model"]
    assert engine_named(engine.name).name == engine.name


@pytest.mark.parametrize("name", ENGINES)
def test_weights_are_exported(tmp_path: Path, name: str) -> None:
    """The recorded name leads to the whole weights, or to the reason why there are none."""
    parts = _parts(1, steps=1)
    engine = _engine(name, parts)
    engine.save(tmp_path, Direct().write)
    if name == "files":
        with pytest.raises(CheckpointError, match="found one of 'files': its script or trainer reads it"):
            weights_of(engine.name, tmp_path)
        return
    found, expected = weights_of(engine.name, tmp_path), parts["model"].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    if name == "dcp":
        assert any(each.startswith("optimizer.state.0.weight.") for each in state_of(name, tmp_path, scratch=tmp_path))
    else:
        with pytest.raises(CheckpointError, match="whose optimizer does not know the names of parameters"):
            state_of(engine.name, tmp_path, scratch=tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        "tiny",
        pytest.param("ddp", marks=pytest.mark.soak),
        pytest.param("fsdp2", marks=pytest.mark.soak),
        pytest.param("zero1", marks=pytest.mark.slow),
    ],
)
def test_fewer_ranks_load_and_export(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two ranks save, one loads the state and trains on, and a process without ranks exports the weights."""
    monkeypatch.setenv("PYTHONPATH", str(tiny))
    saved = save(tmp_path, 2, engine=kind)
    loaded = saved.load(1)
    assert not any(loaded.codes), loaded.stderr
    assert_same(loaded.state, saved.state)
    found = weights_of({"tiny": "tiny", "zero1": "deepspeed"}.get(kind, "dcp"), saved.folder)
    assert all(torch.equal(found[name], saved.state["tensors"][name]) for name in ("body.weight", "head.bias"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", "found 'tinny': did you mean 'tiny'\\? Installed are .*deepspeed, .*torch"),
        ("lost", "No module named 'a_package_that_is_missing': pip install \"tiny-engines\\[lost\\]\""),
    ],
)
def test_missing_engine_is_named(tmp_path: Path, name: str, message: str) -> None:
    """An unknown name lists what is installed, and a missing package is named with the command that installs it."""
    with pytest.raises(BadInput, match=message):
        weights_of(name, tmp_path)
    with pytest.raises(BadInput, match=message):
        adapt(None, name, **_parts(1))


def test_missing_deepspeed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are recognized without the package, and reading them names the command that installs it."""
    for name in ("deepspeed.runtime.fp16.loss_scaler", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    for read in (lambda: foreign_checkpoint(tmp_path), lambda: weights_of("deepspeed", tmp_path)):
        with pytest.raises(BadInput, match='pip install "dlac-pipeline\\[deepspeed\\]"'):
            read()
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        SpecInvalid, match=r"of DeepSpeed \(<tag>/\*model_states.pt\), Tiny \(state.tiny\), torch.*found \[\]"
    ):
        foreign_checkpoint(tmp_path / "empty")


def test_installed_engine_trains_and_exports(arena: Arena) -> None:
    """A run whose spec names another author's engine resumes, exports its weights, and begins from such files."""
    arena.table(appends=(640,))
    spec = arena.spec("r", world_size=1, passes=1, engine="tiny")
    (path := arena.home / "r.yaml").write_text(yaml.safe_dump(spec.model_dump()))
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    for until in (15, None):
        parts = _parts(until or 2)
        with dlac.training_run(path) as run:
            run.restore(**parts)
            for batch in run.batches():
                if batch.step == until:
                    break
                run.step_done(0.0)
        if until:
            first = parts
    assert [row.step for row in arena.lineage("r")] == [10, 20]
    exported = export_weights(arena.lakehouse, tiers_of(spec), arena.home / "weights.safetensors")
    assert _equal(load_file(exported.path), first["model"].state_dict())
    (folder := arena.home / "foreign").mkdir()
    _engine("tiny", first).save(folder, Direct().write)
    adopted = arena.spec("adopted", world_size=1, passes=1, engine="tiny")
    adopt_checkpoint(arena.lakehouse, adopted, foreign_checkpoint(folder))
    exported = export_weights(arena.lakehouse, tiers_of(adopted), arena.home / "adopted.safetensors")
    assert _equal(load_file(exported.path), first["model"].state_dict())
    with pytest.raises(SpecInvalid, match="engine: expected an installed engine in engine, found 'tinny'"):
        arena.spec("r", engine="tinny")


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
