"""The rank of benchmarks/checkpoint.py: DLAC's checkpoints of a model of ~100M parameters, alternating with others.

Steps of training follow each asynchronous checkpoint, as its copy and its write continue beside them. DeepSpeed's are steps of
the optimizer only.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.durable_io import fsync_path

_WIDTH, _LAYERS, _VOCABULARY, _TOKENS = 768, 10, 32_768, 48
_BESIDE = 3
"""Steps beside an asynchronous checkpoint. Then follows one beside none. A round has both twice, for DLAC and for DCP."""


def model() -> torch.nn.Module:
    """Return a model of about 100 million parameters."""
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(_VOCABULARY, _WIDTH),
        torch.nn.TransformerEncoder(layer, _LAYERS),
        torch.nn.Linear(_WIDTH, _WIDTH * 4),
    )


def main() -> None:
    """Save checkpoints of each kind between steps of training, and write the times to a file."""
    with dlac.training_run() as run:
        params = run.spec.params
        scratch = Path(params["scratch"])
        network = model()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
        train = partial(_train, network, optimizer, trains=params["engine"] != "deepspeed")
        train()
        parts: dict[str, Any] = {"model": network, "optimizer": optimizer}
        engine: Any = dlac.DistributedState(**parts) if params["engine"] == "dcp" else dlac.TorchState(**parts)
        deepspeed_engine = None
        if params["engine"] == "deepspeed":
            engine = deepspeed_engine = _deepspeed(network, optimizer)
        elif not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        gate = [0.0, 0.0]  # times before and after DLAC's hook in front of the optimizer's step
        optimizer.register_step_pre_hook(lambda *_: gate.__setitem__(0, time.perf_counter()))
        run.restore(engine)
        optimizer.register_step_pre_hook(lambda *_: gate.__setitem__(1, time.perf_counter()))
        # That of `async_save` itself, with one copy for all calls. DLAC keeps its copy, too.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        scale = float(sum(parameter.numel() for parameter in network.parameters()))
        plain = partial(_plain, deepspeed_engine, parts, scratch)
        begin = None if deepspeed_engine is not None else partial(_dcp, parts, scratch, stager)
        for found in _rounds(run, train, lambda: gate[1] - gate[0], plain, begin):
            with Path(params["out"]).open("a") as stream:
                stream.write(json.dumps({"parameters": scale, **found}) + "\n")


def _rounds(
    run: dlac.TrainingRun,
    train: Callable[[], None],
    gate_s: Callable[[], float],
    plain: Callable[[int, int], dict[str, float]],
    begin: Callable[[int, int], tuple[float, Future[Any]]] | None,
) -> Iterator[dict[str, float]]:
    """Train, and yield the times of each checkpoint and of those beside it. `begin` begins with one of DCP."""
    one: dict[str, float] = {}
    steps: dict[int, float] = {}
    saved: Future[Any] | None = None
    batches, every = iter(run.batches()), run.spec.checkpoint.every_steps
    assert isinstance(every, int)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        requested = time.perf_counter()
        if batch is None:
            return
        train()
        place, is_complete = batch.step % every, batch.step > every
        if place == 1 % every:
            one |= {"wait_s": requested - began + gate_s(), "step": batch.step - 1}
        run.step_done(0.0)
        steps[place] = time.perf_counter() - began
        if place == _BESIDE:
            run.settle()
            while len(list(Path(run.spec.checkpoint.store).glob("*/attempt-*/step-*"))) > 1:
                time.sleep(0.01)  # until retention has removed the one before
        elif place == _BESIDE + 1 and begin is not None:
            one["dcp_stall_s"], saved = begin(batch.step, every)
        elif place == every - 1 and saved is not None:
            saved.result()
        elif place == 0:
            if is_complete:
                yield one | (_lost(steps, one) if every > 1 else {})
            one = plain(batch.step, every)


def _train(network: torch.nn.Module, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
    """Do a step of training, or only the optimizer's part of it."""
    if trains:
        optimizer.zero_grad()
        network(torch.randint(_VOCABULARY, (2, _TOKENS))).square().mean().backward()
    else:
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3) if parameter.grad is None else parameter.grad
    optimizer.step()


def _lost(steps: dict[int, float], one: dict[str, float]) -> dict[str, float]:
    """Return the training time that each checkpoint took: its wait, and by how much the steps beside it were slower."""
    clean_s = (steps[_BESIDE + 1] + steps[0]) / 2
    ours = sum(steps[place] - clean_s for place in range(1, _BESIDE + 1))
    theirs = sum(steps[place] - clean_s for place in range(_BESIDE + 2, 2 * _BESIDE + 2))
    return {"clean_s": clean_s, "lost_s": ours, "dcp_lost_s": theirs + one.get("dcp_stall_s", 0.0)}


def _plain(engine: Any, parts: dict[str, Any], scratch: Path, step: int, every: int) -> dict[str, float]:
    """Save without DLAC."""
    folder = scratch / f"plain-{step}"
    started = time.perf_counter()
    if engine is None:
        _torch_save(parts, folder)
    else:
        _deepspeed_save(engine, folder)
    found = {"plain_s": time.perf_counter() - started, "plain_bytes": float(_bytes(folder))}
    shutil.rmtree(scratch / f"plain-{step - every}", ignore_errors=True)
    return found


def _deepspeed(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    return engine


def _torch_save(parts: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    path = folder / "state.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    fsync_path(path)


def _deepspeed_save(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder), tag="plain")
    for path in folder.rglob("*"):
        if path.is_file():
            fsync_path(path)


def _dcp(
    parts: dict[str, Any], scratch: Path, stager: DefaultStager, step: int, every: int
) -> tuple[float, Future[Any]]:
    """Begin PyTorch's asynchronous distributed checkpoint, whose stager keeps its copy's memory. Return its stall.

    On both sides a checkpoint has its own folder, and the one before is removed. The next one is written to the freed pages,
    which takes half the time of new pages.
    """
    folder = scratch / f"dcp-{step}"
    shutil.rmtree(scratch / f"dcp-{step - 2 * every}", ignore_errors=True)
    state = {name: part.state_dict() for name, part in parts.items()}
    started = time.perf_counter()
    future = async_save(state, checkpoint_id=str(folder), async_stager=stager)
    stall = time.perf_counter() - started
    assert isinstance(future, Future)
    return stall, future


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
