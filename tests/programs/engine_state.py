"""One rank that trains a tiny model with an engine, and saves or loads it through its adapter, without a run.

$REQUEST is JSON: engine (zero0 ... zero3, fsdp2, ddp, tiny), precision (fp32, bf16, fp16), whether a layer is frozen or
unused, the optimizer (one of `OPTIMIZERS`), folder, and the action: save after `steps` steps with writer `direct` or
`copies`, or load what `saved_world_size` ranks saved. Rank 0 writes the whole state to `dump`: parameters, optimizer,
parameter groups, buffers, schedule and loss scale.
"""

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.engines import adapt, prepare_engines
from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.restore.conversion import load_state
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}
SAMPLES = 8
"""Samples of one global batch."""


class Tiny(nn.Module):
    """Uneven layers, a frozen one if requested, and a buffer that counts calls."""

    seen: torch.Tensor

    def __init__(self, frozen: bool, unused: bool) -> None:
        super().__init__()
        self.unused = unused
        self.body = nn.Linear(4, 7)
        self.still = nn.Linear(7, 7)
        self.head = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.still.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per sample."""
        self.seen += 1
        hidden = torch.relu(self.body(x))
        out: torch.Tensor = self.head(hidden if self.unused else torch.relu(self.still(hidden)))
        return out

    def groups(self) -> list[dict[str, Any]]:
        """Return two groups of parameters with different settings."""
        rest = [*self.body.parameters(), *(p for p in self.still.parameters() if p.requires_grad)]
        return [{"params": rest, "weight_decay": 0.1}, {"params": [*self.head.parameters()], "weight_decay": 0.0}]


class TrainedModel:
    """The model with its engine, its step and its state."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.kind, self.precision = request["engine"], request.get("precision", "fp32")
        self.optimizer_name = request.get("optimizer", "adamw")
        self.model = Tiny(request.get("frozen", False), request.get("unused", False))
        self.stage = int(self.kind[4:]) if self.kind.startswith("zero") else None
        self.engine: Engine = self._deepspeed() if self.stage is not None else self._torch()

    def _deepspeed(self) -> Engine:
        import deepspeed

        prepare_engines()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"]["initial_scale_power"] = 8
            config["fp16"]["loss_scale_window"] = 2
        self.deepspeed, _, _, self.scheduler = deepspeed.initialize(
            model=self.model, optimizer=OPTIMIZERS[self.optimizer_name](self.model.groups()), config=config
        )
        return adapt(self.deepspeed)

    def _torch(self) -> Engine:
        wrapped: nn.Module = self.model
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in (self.model.body, self.model.still, self.model.head):
                fully_shard(layer)
            fully_shard(self.model)
        elif self.kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=self.model.unused)
        self.wrapped = wrapped
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.model.groups())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if self.kind == "tiny":
            return adapt(None, self.kind, model=wrapped, optimizer=self.optimizer, scheduler=self.scheduler)
        from dlac_pipeline.extensions.sharded.distributed_state import DistributedState

        return DistributedState(model=wrapped, optimizer=self.optimizer, scheduler=self.scheduler)

    def step(self, number: int) -> float:
        """Train one step on this rank's part of a global batch that is the same for any number of ranks."""
        mine = SAMPLES // dist.get_world_size()
        x = torch.sin(torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4) + number)
        x = x[dist.get_rank() * mine :][:mine].to(DTYPES[self.precision])
        if self.stage is not None:
            loss = ((self.deepspeed(x).squeeze(-1) - x.sum(-1)).float() ** 2).mean()
            self.deepspeed.backward(loss)
            self.deepspeed.step()
        else:
            loss = ((self.wrapped(x).squeeze(-1) - x.sum(-1)) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total.item()) / dist.get_world_size()

    def whole_state(self) -> dict[str, Any]:
        """Return the whole state, gathered. This call is collective."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        rest = {"buffers": buffers, "scheduler": dict(self.scheduler.state_dict())}
        found = self._deepspeed_state() if self.stage is not None else self._torch_state()
        return {**found, **rest}

    def _deepspeed_state(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensors = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        if self.stage in (1, 2):  # DeepSpeed links the states of later groups before they exist
            self.deepspeed.optimizer._hp_optimizer_states_linked = False
            self.deepspeed.optimizer._lazy_init_hp_params_optimizer_state()
        if self.stage == 0:
            tensors["optimizer"] = copy.deepcopy(self.deepspeed.optimizer.state_dict())
        for name, parameter in self.model.named_parameters():
            if self.stage and parameter.requires_grad:
                tensors[name] = safe_get_full_fp32_param(parameter).clone()
                for key in ("momentum_buffer",) if self.optimizer_name == "momentum" else ("exp_avg", "exp_avg_sq"):
                    tensors[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.deepspeed.optimizer.param_groups
        ]
        scaler = getattr(self.deepspeed.optimizer, "loss_scaler", None)
        return {
            "tensors": tensors,
            "groups": groups,
            "loss_scale": None if scaler is None else {"scale": scaler.cur_scale, "at": getattr(scaler, "cur_iter", 0)},
            "steps": [self.deepspeed.global_steps, self.deepspeed.skipped_steps],
        }

    def _torch_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = StateDictOptions(full_state_dict=True)
        model: Any
        model, optimizer = get_state_dict(self.wrapped, self.optimizer, options=whole)
        states: Any = optimizer["state"]
        tensors = {name: value.clone() for name, value in model.items()}
        for name, state in states.items():
            tensors |= {f"{name}.{key}": value.clone() for key, value in state.items()}
        return {"tensors": tensors, "groups": copy.deepcopy(optimizer["param_groups"])}


def fail_to_write(path: Path, state: Any) -> None:
    """Fail as on a full disk."""
    raise OSError(errno.ENOSPC, "no space left on device", str(path))


def main() -> None:
    """Save or load, and dump."""
    request = json.loads(os.environ["REQUEST"])
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() if request["do"] == "load" else 0)
    trained = TrainedModel(request)
    folder, first = Path(request["folder"]), 1
    if request["do"] == "load":
        tree = RankTree(dist.get_rank(), dist.get_world_size(), None)
        saved = request["saved_world_size"]
        first_rank = dist.get_rank() == 0
        load_state(trained.engine, folder, saved_world_size=saved, tree=tree, converts=first_rank, patience_s=150.0)
        first += request["after"]
    losses = [trained.step(number) for number in range(first, first + request.get("steps", 0))]
    state = trained.whole_state()
    if request["do"] == "save":
        folder.mkdir(parents=True, exist_ok=True)
        writer = Direct() if request.get("writer", "direct") == "direct" else Copies(CopyMemory())
        full = dist.get_rank() == request.get("full_rank")
        try:
            trained.engine.save(folder, fail_to_write if full else writer.write)
        except OSError:
            assert full  # only the rank that could not write raises
        writer.handed_over()
        losses += [trained.step(number) for number in range(99, 101)]  # the checkpoint has none of these
        writer.finish()
        dist.barrier()
    if dist.get_rank() == 0:
        torch.save({**state, "losses": losses}, request["dump"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
