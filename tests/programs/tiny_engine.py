"""An engine of another author: a model, its optimizer and its schedule in one file of tensors, and nothing pickled."""

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from dlac_pipeline.checkpoint.engines.engine import Engine, Foreign, Weights
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.checkpoint.stage.streamed_file import TensorFile

FILE = "state.tiny"


class TinyState(Engine):
    """Replicated state: rank 0 saves it, and any number of ranks loads it."""

    name = "tiny"
    foreign_layout = "Tiny (state.tiny)"

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler

    def save(self, folder: Path, write: Write) -> None:
        """Write the file at rank 0. Settings are texts in its header."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        state = self._optimizer.state_dict()
        tensors = {f"model.{name}": each for name, each in self._model.state_dict().items()}
        for number, found in state["state"].items():
            tensors |= {f"optimizer.{number}.{key}": each for key, each in found.items()}
        settings = [state["param_groups"], self._scheduler.state_dict() if self._scheduler else None]
        write(folder / FILE, TensorFile(tensors, {"settings": json.dumps(settings)}))

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Read the file at every rank."""
        tensors = load_file(folder / FILE)
        with safe_open(folder / FILE, "pt") as file:
            groups, schedule = json.loads(file.metadata()["settings"])
        self._model.load_state_dict(_below("model", tensors))
        state: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in _below("optimizer", tensors).items():
            number, key = name.split(".")
            state[int(number)][key] = tensor
        for group in groups:
            group["betas"] = tuple(group["betas"])  # JSON has lists only
        self._optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
        if self._scheduler:
            self._scheduler.load_state_dict(schedule)

    def modules(self) -> dict[str, Any]:
        """Return the model."""
        return {"model": self._model}

    @classmethod
    def weights_in(cls, folder: Path, part: str) -> Weights:
        """Return the tensors of the model."""
        return _below(part, load_file(folder / FILE))

    @classmethod
    def foreign(cls, folder: Path) -> Foreign | None:
        """Return the file that a program without DLAC has written."""
        if not (folder / FILE).is_file():
            return None
        return Foreign(origin=folder, engine=cls.name, world_size=1, files=[], copy=partial(_copy, folder))


def _below(part: str, tensors: Weights) -> Weights:
    return {name.removeprefix(f"{part}."): each for name, each in tensors.items() if name.startswith(f"{part}.")}


def _copy(folder: Path, target: Path, write: Write) -> None:
    with safe_open(folder / FILE, "pt") as file:
        write(target / FILE, TensorFile(load_file(folder / FILE), file.metadata()))
