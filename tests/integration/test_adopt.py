"""A run that begins from a foreign checkpoint: its state is loaded, and its history is reported as unknown."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.checkpoint.store import folder_of, tiers_of
from dlac_pipeline.extensions.exchange.export import export_tensors
from dlac_pipeline.extensions.exchange.exported_files import checkpoint_of_file
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.extensions.exchange.fork import adopt_checkpoint
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, CheckpointError, CheckpointUnsafe, SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import Arena
from tests.fixtures import Command
from tests.integration.test_cli import dlac as dlac_command

SAVE_DEEPSPEED = """
import sys
import deepspeed, torch
from dlac_pipeline.checkpoint.engines import prepare_engines
prepare_engines()
torch.manual_seed(7)
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
config = {"train_micro_batch_size_per_gpu": 16, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
config["zero_optimization"] = {"stage": 1}
engine, *_ = deepspeed.initialize(model=model, config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(16, 4)).sum())
    engine.step()
engine.save_checkpoint(sys.argv[1], tag="mine")
torch.distributed.destroy_process_group()
"""


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that were somewhere else before."""
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def layout_folder(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Save a trained model in a layout of torch's checkpoints, or as safetensors. Return its weights."""
    model, optimizer = trained()
    weights: Any
    weights, state = get_state_dict(model, optimizer)
    if kind == "pretrained":
        folder.mkdir()
        save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    writer = None if kind == "dcp" else HuggingFaceStorageWriter(str(folder), save_distributed=kind == "shards")
    saved = {"model": weights, "optimizer": state if kind == "dcp" else {"state": state["state"]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(saved, checkpoint_id=folder, storage_writer=writer, no_dist=True)
    return model.state_dict()


def adopted(arena: Arena, kind: str) -> tuple[JobSpec, dict[str, torch.Tensor]]:
    """Begin the run "r" of ten steps with a trained model in a layout. Return its spec, and the model's weights."""
    arena.table(appends=(320,))
    spec = arena.spec("r", world_size=1, passes=1)
    weights = layout_folder(arena.home / "foreign", kind)
    assert adopt_checkpoint(arena.lakehouse, spec, foreign_checkpoint(arena.home / "foreign")) == arena.head("r")
    return spec, weights


@pytest.mark.slow
def test_safetensors_begin_a_run(arena: Arena) -> None:
    """What the layout lacks is the script's: the state of the optimizer, and the schedule."""
    spec, weights = adopted(arena, "pretrained")
    start, optimizer = begin(arena, spec, nested=True)
    assert all(torch.equal(start[name], weights[name]) for name in weights)
    assert (optimizer["param_groups"][0]["lr"], optimizer["state"]) == (0.03, {})
    assert audit_run(arena.lakehouse, "r").exact
    assert [row.step for row in arena.lineage("r")] == [0, 10]


def begin(
    arena: Arena, spec: JobSpec, *, nested: bool = False, schedule: bool = True, frozen: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train to the end, unless `frozen`. Return weights and optimizer of the start. A `nested` layer has two names."""
    with arena.training_run(spec) as run:
        layer = torch.nn.Linear(4, 1)
        model = torch.nn.ModuleDict({"model": layer, "again": layer}) if nested else layer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if schedule:
            parts["schedule"] = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        run.restore(dlac.DistributedState(**parts))
        start = {name: value.clone() for name, value in model.state_dict().items()}
        loaded = copy.deepcopy(optimizer.state_dict())
        for _ in run.batches():
            if not frozen:
                layer(torch.ones(5, 4)).sum().backward()
                optimizer.step()
            run.step_done(0.0)
    return start, loaded


@pytest.mark.slow
def test_exported_state_begins_a_run(arena: Arena) -> None:
    """`dlac checkpoint export-state` writes what `adopt` takes. The digest of the file leads to the checkpoint."""
    spec, _ = adopted(arena, "dcp")
    weights, _ = begin(arena, spec, schedule=False, frozen=True)
    out = arena.home / "state"
    command = ("checkpoint", "export-state", "r", str(out), "--spec", str(arena.home / "r.yaml"))
    done = dlac_command(*command, home=arena.home)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    assert checkpoint_of_file(arena.lakehouse, file)["checkpoint_id"] == arena.head("r")
    assert "expected a new or empty folder" in dlac_command(*command, home=arena.home).stderr
    other = arena.spec("r2", world_size=1, passes=1)
    adopt_checkpoint(arena.lakehouse, other, foreign_checkpoint(out))
    start, optimizer = begin(arena, other)
    assert all(torch.equal(start[name], weights[name]) for name in weights)
    assert [state["step"] for state in optimizer["state"].values()] == [3, 3]


@pytest.mark.slow
def test_damaged_shard_is_not_exported(arena: Arena) -> None:
    """The digest of the file of tensors is compared before anything is read from it."""
    spec, _ = adopted(arena, "shards")
    (row,) = arena.lineage("r")
    (path,) = folder_of(row.manifest_uri).glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"shard-00001-model-00001-of-00001\.safetensors"):
        export_tensors(arena.lakehouse, tiers_of(spec), arena.home / "state")
    assert not (arena.home / "state").exists()


def copied(folder: Path) -> Path:
    """Adopt a folder into a new one next to it, and return that."""
    (target := folder.with_name(f"{folder.name}-adopted")).mkdir(exist_ok=True)
    with warnings.catch_warnings(action="ignore"):
        foreign_checkpoint(folder).copy(target, Direct().write)
    return target


def place_shard(folder: Path, number: int, rows: list[int]) -> Path:
    """Write rows of a tensor of 4 columns as torch's own writer does; gives the file."""
    path = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    places = {"model.weight": {"saved_offsets": [rows[0], 0]}}
    about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({"model.weight": torch.tensor(rows).float()[:, None].repeat(1, 4)}, path, about)
    return path


@pytest.mark.parametrize("shards", [[[0, 1], [4, 5]], [[0, 1], [1, 2, 3]]])
def test_incomplete_shards_are_refused(tmp_path: Path, shards: list[list[int]]) -> None:
    """Rows that no file has, and rows of two files, of which either may be right. Nothing is read from memory instead."""
    for number, rows in enumerate(shards, 1):
        place_shard(tmp_path, number, rows)
    with pytest.raises(
        SpecInvalid, match=r"of \d+ elements of 'model\.weight', or some twice, in the files \['shard-0000"
    ):
        copied(tmp_path)


def test_missing_last_shard_is_refused(tmp_path: Path) -> None:
    """Without the last shard the rest is a smaller tensor, which no model loads."""
    *_, last = [place_shard(tmp_path, 1 + first // 2, [first, first + 1]) for first in (0, 2, 4)]
    model = torch.nn.Linear(4, 6, bias=False)
    dlac.DistributedState(model=model).load(copied(tmp_path), saved_world_size=1)
    assert model.weight[:, 3].tolist() == [0, 1, 2, 3, 4, 5]
    last.unlink()
    shutil.rmtree(tmp_path.with_name(f"{tmp_path.name}-adopted"))
    with pytest.raises(CheckpointError, match=r"(?i)size mismatch"):
        dlac.DistributedState(model=model).load(copied(tmp_path), saved_world_size=1)


def test_files_of_the_index_are_read(tmp_path: Path) -> None:
    """And no others. Without an index `model.safetensors` is read, and a choice of several files is refused."""
    folder = tmp_path / "pretrained"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = folder / "model.safetensors.index.json"
    names = ("model-00001-of-00001", "model", "model.fp16", "adapter_model")
    for number, name in enumerate(names):
        save_file({"weight": torch.full((1, 1), float(number))}, folder / f"{name}.safetensors")

    def weight() -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        shutil.rmtree(tmp_path / "pretrained-adopted", ignore_errors=True)
        dlac.DistributedState(model=model).load(copied(folder), saved_world_size=1)
        return model.weight.item()

    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}}))
    assert weight() == 0
    index.write_text(json.dumps({"weight_map": {"weight": names[0], "bias": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(SpecInvalid, match=r"found no file 'model-00.*', which model\.safetensors\.index\.json names"):
        copied(folder)
    index.unlink()
    assert weight() == 1
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecInvalid, match="adopt a folder with one set of weights"):
        copied(folder)


def test_code_in_the_index_is_refused(tmp_path: Path) -> None:
    """Also in a folder of safetensors, where it is hidden, and in the plain values of DCP's own files."""
    layout_folder(folder := tmp_path / "pretrained", "pretrained")
    touched = tmp_path / "touched"
    (folder / ".metadata").write_bytes(pickle.dumps(_Touch(touched)))
    with pytest.raises(CheckpointUnsafe, match="Path"):
        copied(folder)
    dcp = tmp_path / "dcp"
    with warnings.catch_warnings(action="ignore"):
        save({"model": {"weight": torch.ones(1)}, "other": _Touch(touched)}, checkpoint_id=dcp, no_dist=True)
    with pytest.raises(CheckpointUnsafe):
        copied(dcp)
    assert not touched.exists()


def test_truncated_safetensors_begin_no_run(arena: Arena) -> None:
    """The error names the folder, and nothing is committed."""
    arena.table(appends=(320,))
    folder = arena.home / "foreign"
    layout_folder(folder, "shards")
    (path,) = folder.glob("*.safetensors")
    os.truncate(path, 200)
    with pytest.raises(SpecInvalid, match=r"expected a whole checkpoint in '.*foreign', found"):
        adopt_checkpoint(arena.lakehouse, arena.spec("r"), foreign_checkpoint(folder))
    assert arena.rows("r", CheckpointRow) == []


def test_a_dcp_checkpoint_begins_a_run(arena: Arena, here: Command) -> None:
    """Weights and optimizer come from the foreign checkpoint, all rows are consumed after it, and the ledger has its origin."""
    spec, weights = adopted(arena, "dcp")
    start, optimizer = begin(arena, spec, schedule=False)
    assert all(torch.equal(start[name], weights[name]) for name in weights)
    assert [state["step"] for state in optimizer["state"].values()] == [3, 3]
    assert audit_run(arena.lakehouse, "r").exact
    assert [row.step for row in arena.lineage("r")] == [0, 10]
    with open_audit(arena.lakehouse) as connection:
        said = connection.execute("SELECT step, adopted FROM lineage WHERE adopted IS NOT NULL").fetchall()
    assert said == [(0, str(arena.home / "foreign"))]
    assert "unknown: adopted from" in here("audit", "r", home=arena.home).stdout
    assert arena.lakehouse.own("recoveries").scan().to_arrow().num_rows == 0


@pytest.mark.soak
def test_a_deepspeed_checkpoint_begins_a_run(arena: Arena) -> None:
    """Both ranks' shards of ZeRO 1 are loaded by `dlac train`; adopting is one command."""
    arena.table(appends=(320,))
    spec = arena.spec("r", program="train_deepspeed.py", passes=1)
    path = arena.home / "job.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    foreign = arena.home / "foreign"
    program = arena.home / "save.py"
    program.write_text(SAVE_DEEPSPEED)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, str(program), str(foreign)], env=environment, check=True, timeout=240)
    adopted = dlac_command("checkpoint", "adopt", str(path), str(foreign), home=arena.home)
    assert adopted.returncode == 0, adopted.stderr
    launch = arena.launched(spec)
    assert launch.of("recovered") == []
    assert launch.of("attempt")[0]["step"] == 0
    root, *_, head = arena.lineage("r")
    assert (root.step, root.world_size, root.parent) == (0, 2, None)
    assert root.adopted == str(foreign / "mine")
    assert head.step == 10
    assert audit_run(arena.lakehouse, "r").exact
    again = dlac_command("checkpoint", "adopt", str(path), str(foreign), home=arena.home)
    assert again.returncode != 0
    assert "choose another name" in again.stderr


def test_what_is_no_checkpoint_is_refused(arena: Arena) -> None:
    """An empty folder, a missing tag, and one with code in it; no run begins."""
    arena.table(appends=(320,))
    folder = arena.home / "foreign"
    (folder / "mine").mkdir(parents=True)
    with pytest.raises(SpecInvalid, match=r"<tag>/\*model_states.pt.*found \['mine'\]"):
        foreign_checkpoint(folder)
    model, _ = trained()
    (own := arena.home / "own").mkdir()
    dlac.DistributedState(model=model).save(own, Direct().write)
    with pytest.raises(SpecInvalid, match=r"one of its own in '.*own': begin a run from it with dlac fork"):
        foreign_checkpoint(own)
    touched = folder / "touched"
    torch.save({"module": _Touch(touched)}, folder / "mine" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointUnsafe):
        foreign_checkpoint(folder, tag="mine")
    assert not touched.exists()
    assert arena.rows("r") == []


@pytest.mark.soak
def test_first_attempt_without_checkpoint_is_kept(arena: Arena) -> None:
    """A claimed attempt may train on another node, whose lock is not visible here. A claim to adopt is continued."""
    arena.table(appends=(320,))
    layout_folder(arena.home / "foreign", "dcp")
    foreign = foreign_checkpoint(arena.home / "foreign")
    training, begun = (arena.spec(run, world_size=1) for run in ("training", "begun"))
    start_attempt(Plans(arena.lakehouse), training, ClaimRequest())
    start_attempt(Plans(arena.lakehouse), begun, ClaimRequest(purpose={"purpose": "adopts", "origin": "foreign"}))
    with pytest.raises(SpecInvalid, match="no run named 'training' yet, found one with 0 checkpoints"):
        adopt_checkpoint(arena.lakehouse, training, foreign)
    assert [row.attempt for row in arena.rows("training", ClaimRow)] == [1]
    assert adopt_checkpoint(arena.lakehouse, begun, foreign) == arena.head("begun")


def test_the_ranks_of_a_bf16_checkpoint_are_counted(arena: Arena) -> None:
    """DeepSpeed names the shards of its bf16 optimizer otherwise."""
    folder = arena.home / "foreign"
    folder.mkdir()
    torch.save({"module": {}}, folder / "mp_rank_00_model_states.pt")
    for rank in range(4):
        torch.save({}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    assert foreign_checkpoint(folder).world_size == 4


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)
