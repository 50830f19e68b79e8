"""The rank of benchmarks/checkpoint.py: DLAC's checkpoints of a model of ~100M parameters, alternating with others.

Between two checkpoints the state changes a little, as in training. Nothing else runs while one of the others is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import time
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

_WIDTH, _LAYERS, _VOCABULARY = 768, 10, 32_768


def model() -> torch.nn.Module:
    """Return a model of about 100 million parameters."""
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(_VOCABULARY, _WIDTH),
        torch.nn.TransformerEncoder(layer, _LAYERS),
        torch.nn.Linear(_WIDTH, _WIDTH * 4),
    )


def main() -> None:
    """Save one checkpoint of each kind per step, and write the times to a file."""
    with dlac.training_run() as run:
        params = run.spec.params
        scratch = Path(params["scratch"])
        measured: list[dict[str, float]] = []
        network = model()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        parts: dict[str, Any] = {"model": network, "optimizer": optimizer}
        engine: Any = dlac.DistributedState(**parts) if params["engine"] == "dcp" else dlac.TorchState(**parts)
        deepspeed_engine = None
        if params["engine"] == "deepspeed":
            engine = deepspeed_engine = _deepspeed(network, optimizer)
        elif not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        run.restore(engine)
        # That of `async_save` itself, with one copy for all calls. DLAC keeps its copy, too.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        for batch in run.batches():
            optimizer.step()
            # On both sides a checkpoint has its own folder, and the one before is removed at once. The next one is written to the
            # freed pages, which takes half the time of new pages.
            plain = partial(_plain, deepspeed_engine, parts, scratch, batch.step, stager)
            here = {"parameters": float(sum(parameter.numel() for parameter in network.parameters()))}
            here |= plain() if batch.step % 2 else {}
            started = time.perf_counter()
            run.step_done(0.0)
            here["step_done_s"] = time.perf_counter() - started
            run.settle()
            while len(list(Path(run.spec.checkpoint.store).glob("*/attempt-*/step-*"))) > 1:
                time.sleep(0.01)  # until retention has removed the one before
            here |= {} if batch.step % 2 else plain()
            measured.append(here)
            Path(params["out"]).write_text(json.dumps(measured))


def _plain(engine: Any, parts: dict[str, Any], scratch: Path, step: int, stager: DefaultStager) -> dict[str, float]:
    """Save without DLAC."""
    folder = scratch / f"plain-{step}"
    started = time.perf_counter()
    if engine is None:
        _torch_save(parts, folder)
    else:
        _deepspeed_save(engine, folder)
    found = {"plain_s": time.perf_counter() - started, "plain_bytes": float(_bytes(folder))}
    shutil.rmtree(scratch / f"plain-{step - 1}", ignore_errors=True)
    if engine is None:
        found |= _dcp(parts, scratch / f"dcp-{step}", stager)
        shutil.rmtree(scratch / f"dcp-{step - 1}", ignore_errors=True)
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


def _dcp(parts: dict[str, Any], folder: Path, stager: DefaultStager) -> dict[str, float]:
    """Return stall and total time of PyTorch's asynchronous distributed checkpoint, whose stager keeps its copy's memory."""
    state = {name: part.state_dict() for name, part in parts.items()}
    started = time.perf_counter()
    future = async_save(state, checkpoint_id=str(folder), async_stager=stager)
    stall = time.perf_counter() - started
    assert isinstance(future, Future)
    future.result()
    return {"dcp_stall_s": stall, "dcp_s": time.perf_counter() - started}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
