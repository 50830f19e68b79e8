"""Checkpoints of other programs: their kind, and their files as an engine of ours loads them."""

import json
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import metadata as metadatas
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from dlac_pipeline.checkpoint.engines import Engine, engine_named
from dlac_pipeline.checkpoint.engines.engine import Foreign
from dlac_pipeline.checkpoint.engines.safe_load import only_tensors
from dlac_pipeline.checkpoint.engines.shard_names import INDEX, box
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.stage.copies import Direct, Write
from dlac_pipeline.checkpoint.stage.durable_writer import DurableWriter
from dlac_pipeline.checkpoint.store import MANIFEST, Tiers
from dlac_pipeline.extensions.exchange.weights import WEIGHTS_FILE, WEIGHTS_INDEX
from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.spec.job_spec import ENGINES

_DCP = "dcp"
"""Name of the engine that loads these checkpoints, `DistributedState`."""
_RECORDS = {(_StorageInfo.__module__, _StorageInfo.__name__), ("torch.serialization", "_get_layout")} | {
    (metadatas.__name__, name) for name in (*metadatas.__all__, "_MEM_FORMAT_ENCODING")
}


def foreign_checkpoint(folder: Path, *, tag: str | None = None) -> Foreign:
    """Return the checkpoint of DCP, of Hugging Face or of an installed engine's library in `folder`.

    `tag` names a folder in it, by default that in the file `latest`, as DeepSpeed does. DCP's tensors are read into memory here,
    so that a copy refuses nothing. Raise `SpecInvalid` if the folder contains none of them, and `CheckpointUnsafe` if a file
    contains more than tensors, plain values and a few known classes.
    """
    _check_foreign(folder)
    if (folder / ".metadata").is_file():
        return _of_dcp(folder, _read(folder, _PlainReader(folder)), [])
    latest = folder / "latest"
    named = tag or (latest.read_text(errors="replace").strip() if latest.is_file() else ".")
    tagged = folder / named
    if not tagged.resolve().is_relative_to(folder.resolve()):
        raise SpecInvalid(
            f"expected a tag that names a folder in {str(folder)!r}, found {named!r}: name that folder itself, or its tag "
            "with --tag"
        )
    _check_foreign(tagged)
    engines = list(_installed_engines())
    for engine in engines:
        if (found := engine.foreign(tagged)) is not None:
            return found
    for each in [tagged] if tag or tagged.exists() else [folder]:  # `latest` may name a folder that was removed
        if list(each.glob("*.safetensors")):
            files = _tensor_files(each)
            return _of_dcp(each, _read_safetensors(each, files), files)
    layouts = [each.foreign_layout for each in engines if each.foreign_layout]
    known = ", ".join([*layouts, "torch.distributed.checkpoint (.metadata)"])
    raise SpecInvalid(
        f"expected a checkpoint of {known} or Hugging Face (*.safetensors) in {str(folder)!r}, found "
        f"{sorted(path.name for path in folder.glob('*'))[:8]!r}: name its folder, and --tag where there is no file `latest`"
    )


def _installed_engines() -> Iterator[type[Engine]]:
    """Yield the engines of extensions whose packages are installed."""
    for name in ENGINES.points():
        with suppress(BadInput):
            yield engine_named(name)


def copy_foreign(foreign: Foreign, tiers: Tiers, name: str, folder: Path) -> list[FileEntry]:
    """Copy a foreign checkpoint into a checkpoint's folder and into its copy in the store. Return the files."""
    writer = DurableWriter(tiers, name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            foreign.copy(folder, Direct(writer.save).write)
            return writer.finish()
    finally:
        writer.close()


def _check_foreign(folder: Path) -> None:
    """Raise `SpecInvalid` for a checkpoint of DLAC's, or the folder in it that has the files of its engine."""
    manifests = [path for path in (folder / MANIFEST, folder.parent / MANIFEST) if path.is_file()]
    if (folder / INDEX).is_file() or any(b'"ledger_uuid"' in path.read_bytes() for path in manifests):
        raise SpecInvalid(
            f"expected a checkpoint that DLAC did not write, found one of its own in {str(folder)!r}: begin a run from it with "
            "dlac fork"
        )


def checkpoint_of_header(file: Path) -> str | None:
    """Return the checkpoint of DLAC's that the header of a safetensors file names as its origin, or None."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return dict(opened.metadata() or {}).get("dlac.checkpoint_id")
    except (OSError, SafetensorError) as err:
        raise _broken(file.parent, f"{type(err).__name__}: {err}") from err


def _of_dcp(folder: Path, state: dict[str, Any], files: list[Path]) -> Foreign:
    ours: dict[str, Any] = {name: state.pop(name) for name in ("model", "optimizer") if name in state}
    if "model" not in ours:
        raise SpecInvalid(
            f"expected the entries 'model' and 'optimizer' in the checkpoint {str(folder)!r}, found {sorted(state)!r}"
        )
    copy = partial(_copy_dcp, ours, state)
    return Foreign(origin=folder, engine=_DCP, world_size=1, files=files, copy=copy)


def _copy_dcp(ours: dict[str, Any], state: dict[str, Any], target: Path, write: Write) -> None:
    ENGINES.load(_DCP, setting="the engine of an adopted checkpoint").write_adopted(ours, target, write)
    rest = {name: value for name, value in state.items() if isinstance(value, dict | torch.Tensor)}
    TorchState.write_parts(target, write, rest)


def _read_safetensors(folder: Path, files: list[Path]) -> dict[str, Any]:
    """Return the tensors by part. They belong to a bare model, unless each name begins with a part's name."""
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Files([str(path) for path in files])
    tensors = _read(folder, reader)
    if (folder / "config.json").exists() or any(name.split(".")[0] not in ("model", "optimizer") for name in tensors):
        return {"model": tensors}
    parts: dict[str, Any] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts


def _tensor_files(folder: Path) -> list[Path]:
    """Return the files of one set of weights: the index's files, `model.safetensors`, the shards of ranks, or the only file."""
    index, whole = folder / WEIGHTS_INDEX, folder / WEIGHTS_FILE
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as err:
            raise _broken(folder, f"{WEIGHTS_INDEX} without a weight_map ({err})") from err
        if missing := sorted(str(name) for name in named if not (folder / Path(str(name)).name).is_file()):
            raise _broken(folder, f"no file {missing[0]!r}, which {WEIGHTS_INDEX} names")
        return [folder / Path(name).name for name in sorted(named)]
    found = sorted(folder.glob("*.safetensors"))
    chosen = [whole] if whole in found else list(folder.glob("shard-*.safetensors")) or found
    if not chosen or (chosen is found and len(found) > 1):
        raise SpecInvalid(
            f"expected {WEIGHTS_INDEX}, {WEIGHTS_FILE}, shard-*.safetensors or one safetensors file in {str(folder)!r}, found "
            f"{[path.name for path in found][:8]!r}: adopt a folder with one set of weights"
        )
    return chosen


class _Files(FileSystem):
    """A folder that shows some of its files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return self._files


class _PlainReader(FileSystemReader):
    """Reads DCP's index, which is a pickle, without running code in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadatas.Metadata:
        """Return the index. Raise `pickle.UnpicklingError` if it contains something else than DCP's records."""
        with (Path(self.path) / ".metadata").open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
        if not isinstance(found, metadatas.Metadata):
            raise pickle.UnpicklingError(type(found).__name__)
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """Makes DCP's records only. None of them does anything when it is made."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath"):
            return PurePosixPath
        value = getattr(torch, name, None)
        if module == "torch" and (value is torch.Size or isinstance(value, torch.dtype)):
            return value
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _read(folder: Path, reader: FileSystemReader) -> dict[str, Any]:
    """Return the whole state. Raise `SpecInvalid` if a part is missing or occurs twice, `CheckpointUnsafe` as `only_tensors`."""
    state: dict[str, Any] = {}
    everything = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with only_tensors(folder):
        try:
            _check_whole(folder, reader.read_metadata())
            _load_state_dict(state, storage_reader=reader, planner=everything, no_dist=True)
        except (SpecInvalid, pickle.UnpicklingError):
            raise
        except CheckpointException as err:
            cause, _ = err.failures[0]
            if isinstance(cause, pickle.UnpicklingError):
                raise cause from err
            raise _broken(folder, f"{type(cause).__name__}: {cause}") from err
        except Exception as err:  # a damaged header can raise anything
            raise _broken(folder, f"{type(err).__name__}: {err}") from err
    return state


def _check_whole(folder: Path, metadata: metadatas.Metadata) -> None:
    """Check that the parts of each tensor are all of it. DCP loads missing parts from memory that nothing was written to."""
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, metadatas.TensorStorageMetadata):
            continue
        parts, whole = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if parts != whole or (len(entry.chunks) > 1 and not _is_covered(entry)):
            places = [each for index, each in metadata.storage_data.items() if index.fqn == name]
            files = sorted({Path(each.relative_path).name for each in places})
            raise _broken(folder, f"{parts} of {whole} elements of {name!r}, or some twice, in the files {files!r}")


def _is_covered(entry: metadatas.TensorStorageMetadata) -> bool:
    covered = torch.zeros(entry.size, dtype=torch.bool)
    for chunk in entry.chunks:
        covered[box(chunk.offsets, chunk.sizes)] = True
    return bool(covered.all())


def _broken(folder: Path, found: str) -> SpecInvalid:
    return SpecInvalid(f"expected a whole checkpoint in {str(folder)!r}, found {found}; adopt another copy of it")
