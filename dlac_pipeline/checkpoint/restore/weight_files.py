"""Files of weights: one safetensors file, or a folder that `from_pretrained` of Hugging Face's transformers loads."""

import json
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from dlac_pipeline.checkpoint.engines.shards import sharding_info, tensor_file
from dlac_pipeline.checkpoint.engines.weights import Weights
from dlac_pipeline.checkpoint.stage.streamed_file import DTYPES, TensorFile, Written, write_state
from dlac_pipeline.lakehouse.durable_io import fsync_path
from dlac_pipeline.lakehouse.errors import CheckpointError
from dlac_pipeline.lakehouse.store_files import file_digest

WrittenFiles = dict[str, Written]
"""By name."""
_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_DESCRIPTIONS = (
    *(
        "generation_config.json",
        "*token*.json",
        "vocab.*",
        "merges.txt",
        "*.model",
        "chat_template.*",
        "*processor_config.json",
    ),
    *(f"{kind}_*.py" for kind in ("configuration", "modeling", "tokenization", "processing", "image_processing")),
)
"""Names of further files that describe a model and its tokenizer."""


def write_file(weights: Weights, path: Path, about: Mapping[str, str]) -> WrittenFiles:
    """Write one file, which is durable then.

    Raises:
        OSError: it cannot be written.
        CheckpointError: safetensors cannot contain a tensor. The message names it.
    """
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES or name == "__metadata__":
            raise CheckpointError(
                f"expected weights of types and names that safetensors has, found {tensor.dtype} in {name!r}: export another "
                "part, or load the checkpoint in a script"
            )
    written = write_state(TensorFile(weights, {"format": "pt", **about}), path)
    fsync_path(path)
    return {path.name: written}


def write_folder(
    weights: Weights, folder: Path, about: Mapping[str, str], *, config: Path, shard_bytes: int
) -> WrittenFiles:
    """Write a new folder with the weights, in files of about `shard_bytes`, and with what describes the model in `config`.

    The files of the model's configuration are not among the returned ones. Raises as `write_file`.
    """
    folder.mkdir()
    for path in _described_in(config):
        shutil.copyfile(path, folder / path.name)
        fsync_path(folder / path.name)
    (folder / _CONFIG).write_text(_config_of(config, weights))
    fsync_path(folder / _CONFIG)
    written: WrittenFiles = {}
    shards = _split(weights, shard_bytes)
    for name, shard in shards.items():
        written |= write_file(shard, folder / name, about)
    if len(shards) > 1:
        places = {tensor: name for name, shard in shards.items() for tensor in shard}
        total = sum(tensor.nbytes for tensor in weights.values())
        index = folder / _INDEX
        index.write_text(json.dumps({"metadata": {"total_size": total, **about}, "weight_map": places}, indent=2))
        fsync_path(index)
        written[_INDEX] = Written(digest=file_digest(index), bytes=index.stat().st_size, digest_s=0.0)
    fsync_path(folder)
    return written


def write_state_folder(state: Weights, folder: Path, about: Mapping[str, str]) -> WrittenFiles:
    """Write a new folder that torch.distributed.checkpoint loads. Raises as `write_file`."""
    folder.mkdir()
    places = sharding_info({name: [0] * each.dim() for name, each in state.items()})
    written = write_file(state, folder / tensor_file(0), {**places, **about})
    fsync_path(folder)
    return written


def _described_in(config: Path) -> Iterable[Path]:
    """Return the files of a model's folder that are no weights, without its configuration."""
    return (
        path
        for path in sorted(config.iterdir())
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _DESCRIPTIONS)
    )


def _config_of(config: Path, weights: Weights) -> str:
    """Return the model's configuration with the type of the weights. transformers would cast them to another one."""
    floats = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    widest = max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
    dtype = str(widest).removeprefix("torch.")

    def typed(entries: dict[str, Any]) -> dict[str, Any]:
        return {name: dtype if name in ("dtype", "torch_dtype") else value for name, value in entries.items()}

    found = json.loads((config / _CONFIG).read_text(), object_hook=typed)
    return json.dumps({**found, "dtype": dtype}, indent=2) + "\n"


def _split(weights: Weights, shard_bytes: int) -> dict[str, Weights]:
    """Return the weights by the names of their files."""
    shards: list[Weights] = [{}]
    room = shard_bytes
    for name, tensor in sorted(weights.items()):
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        return {_FILE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
