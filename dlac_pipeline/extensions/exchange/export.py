"""Export of a checkpoint's weights: one safetensors file, or a folder that Hugging Face's `from_pretrained` or DCP loads."""

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.engines.engine import Weights
from dlac_pipeline.checkpoint.engines.shard_names import sharding_info, tensor_file
from dlac_pipeline.checkpoint.restore.verified_copy import Restored, restore
from dlac_pipeline.checkpoint.stage.streamed_file import DTYPES, TensorFile, Written, write_state
from dlac_pipeline.checkpoint.store import Tiers, storing
from dlac_pipeline.extensions.exchange.exported_files import record_exports
from dlac_pipeline.extensions.exchange.weights import WEIGHTS_FILE, WEIGHTS_INDEX, state_of, weights_of
from dlac_pipeline.lakehouse.durable_io import fsync_path, make_folder_durably
from dlac_pipeline.lakehouse.errors import CheckpointError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.lakehouse.store_files import file_digest

WrittenFiles = dict[str, Written]
"""Name of a file -> facts about it."""
_Read = Callable[[Restored, Path], Weights]
"""Reads the tensors of a checkpoint, with a folder for temporary files."""
_Write = Callable[[Weights, Path, dict[str, str]], WrittenFiles]
"""Writes tensors to a path, with texts about them."""
_CONFIG = "config.json"
_ABOUT = ("run", "checkpoint_id", "step", "model_digest", "ledger_uuid")
"""Facts of the manifest that each file of weights has in its header."""
_DESCRIPTIONS = (
    *("generation_config.json", "*processor_config.json", "chat_template.*"),
    *("*token*.json", "vocab.*", "merges.txt", "*.model"),
    *(f"{kind}_*.py" for kind in ("configuration", "modeling", "tokenization", "processing", "image_processing")),
)
"""Names of further files that describe a model and its tokenizer."""
SHARD_BYTES = 5_000_000_000
"""Most bytes of a file in a folder, as Hugging Face's libraries divide a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A file or a folder of weights, known to the ledger."""

    path: Path
    digest: str
    """BLAKE3 of the file. If a folder has several files of weights: of their index."""
    bytes: int
    """Size of the files of weights."""
    tensors: int
    checkpoint_id: str
    step: int
    files: list[str]
    """Names of the files whose digests the ledger has."""


def export_weights(
    lakehouse: Lakehouse,
    tiers: Tiers,
    path: Path,
    *,
    step: int | None = None,
    part: str = "model",
    config: Path | None = None,
) -> Exported:
    """Write the weights of a step's checkpoint, or of the head, as safetensors, and the digests of the files to the ledger.

    With `config`, the folder of a model's `config.json`, `path` becomes a folder that `from_pretrained` loads, and else a file.

    Raises:
        SpecInvalid: `path` is unsuitable, `part` is blank, or `config` describes no model.
        NoSuchRun: the run does not exist.
        NoSuchCheckpoint: it has no restorable checkpoint of that step.
        CheckpointDamaged: its files differ from those committed. Nothing was written.
        StoreUnavailable: the file cannot be written.
    """
    if not part.strip():
        raise SpecInvalid(f"expected the name of a part, found {part!r}: name one, such as --part model")
    path = target_of(path, is_folder=config is not None)
    write: _Write = write_file
    if config is not None:
        _check_config(config)
        write = partial(write_folder, config=config, shard_bytes=SHARD_BYTES)

    def read(found: Restored, scratch: Path) -> Weights:
        return weights_of(found.manifest.engine, found.folder, part=part)

    return export_part(lakehouse, tiers, path, step, part, read, write)


def export_tensors(lakehouse: Lakehouse, tiers: Tiers, path: Path, *, step: int | None = None) -> Exported:
    """Write the tensors of model and optimizer into a new folder that DCP loads. Raises as `export_weights`."""

    def read(found: Restored, scratch: Path) -> Weights:
        with storing(scratch, "the folder of the conversion"):
            return state_of(found.manifest.engine, found.folder, scratch=scratch)

    path = target_of(path, is_folder=True)
    return export_part(lakehouse, tiers, path, step, "state", read, write_state_folder)


def target_of(path: Path, *, is_folder: bool) -> Path:
    """Return the place that a finished file or folder can be renamed to."""
    try:
        unusable = not path.name or path.name == ".." or "\0" in str(path)
        target = path if unusable else path.expanduser().resolve()
        if is_folder:
            unusable |= target.is_mount() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
        else:
            unusable |= target.is_dir()
    except (OSError, RuntimeError) as err:  # a name that is too long, or a user's folder that there is not
        raise SpecInvalid(f"expected a file or folder to write, found {str(path)!r} ({err}): name one") from err
    if unusable:
        wanted, example = ("a new or empty folder", "my-model") if is_folder else ("a file", "weights.safetensors")
        raise SpecInvalid(f"expected {wanted} to write, no mount point, found {str(path)!r}: name one like {example}")
    return target


def _check_config(config: Path) -> None:
    try:
        found = json.loads((config / "config.json").read_text())
    except (OSError, ValueError) as err:
        raise SpecInvalid(
            f"expected a folder with the config.json of a model, found none in {str(config)!r} ({err}): write it with "
            "model.config.save_pretrained(folder)"
        ) from err
    if not isinstance(found, dict) or "quantization_config" in found:
        raise SpecInvalid(
            f"expected the config.json of a model without quantization_config in {str(config)!r}, as the exported weights are "
            "not quantized: remove that entry"
        )


def export_part(
    lakehouse: Lakehouse, tiers: Tiers, path: Path, step: int | None, part: str, read: _Read, write: _Write
) -> Exported:
    """Verify the checkpoint, make `path` of it, and record the written files as files of `part`."""
    ledger = Ledger(lakehouse)
    hold = f"export:{socket.gethostname()}:{path}"  # exporting there again takes over what was killed
    with (
        dlac.keep_checkpoint(ledger, tiers.run, hold, step=step) as row,
        TemporaryDirectory(prefix="dlac-export-") as own,  # the run's local copies come and go
    ):
        found = restore(row, replace(tiers, local=Path(own)) if tiers.store is not None else tiers)
        with storing(path, "the file of weights"):
            make_folder_durably(path.parent)
            beside = TemporaryDirectory(prefix=f"{path.name[:100]}.tmp-", dir=path.parent)
        with beside as folder:
            (finished := Path(folder) / "finished").mkdir()  # a folder of its own: `read` makes others
            made = finished / path.name
            tensors = read(found, Path(folder))
            with storing(path, "the file of weights"):
                about = {f"dlac.{name}": str(getattr(found.manifest, name)) for name in _ABOUT}
                written = write(tensors, made, about)
            files = [
                ExportRow(checkpoint_id=row.checkpoint_id, digest=each.digest, bytes=each.bytes, file=name, part=part)
                for name, each in written.items()
            ]
            record_exports(ledger, tiers.run, files)  # the ledger first: a file that is there is known
            with storing(path, "the file of weights"):
                made.rename(path)
                fsync_path(path.parent)
    return Exported(
        path=path,
        digest=files[-1].digest,
        bytes=sum(each.bytes for each in files),
        tensors=len(tensors),
        checkpoint_id=row.checkpoint_id,
        step=row.step,
        files=[each.file for each in files],
    )


def write_file(weights: Weights, path: Path, about: Mapping[str, str]) -> WrittenFiles:
    """Write one file, which is durable then. Raise `CheckpointError` if safetensors cannot contain a tensor."""
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
    for path in sorted(config.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _DESCRIPTIONS):
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
        index = folder / WEIGHTS_INDEX
        index.write_text(json.dumps({"metadata": {"total_size": total, **about}, "weight_map": places}, indent=2))
        fsync_path(index)
        written[WEIGHTS_INDEX] = Written(digest=file_digest(index), bytes=index.stat().st_size, digest_s=0.0)
    fsync_path(folder)
    return written


def write_state_folder(state: Weights, folder: Path, about: Mapping[str, str]) -> WrittenFiles:
    """Write a new folder that torch.distributed.checkpoint loads. Raises as `write_file`."""
    folder.mkdir()
    places = sharding_info({name: [0] * each.dim() for name, each in state.items()})
    written = write_file(state, folder / tensor_file(0), {**places, **about})
    fsync_path(folder)
    return written


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
    shards: list[Weights] = [{}]
    room = shard_bytes
    for name, tensor in sorted(weights.items()):
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
