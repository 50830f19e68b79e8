"""A checkpoint's folder, written and read by torch.distributed.checkpoint (DCP). See docs/design/0004-engines.md."""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import metadata as metadatas
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, plain_state
from dlac_pipeline.checkpoint.engines.shard_names import INDEX, box, sharding_info, tensor_file
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.checkpoint.stage.streamed_file import DTYPES, Frozen, TensorFile
from dlac_pipeline.checkpoint.stage.watch import Key, storage_key
from dlac_pipeline.lakehouse.errors import FormatTooNew, SpecInvalid

_FORMAT_VERSION = 2
"""1: all parts of a rank are a list in its `shards-<rank>.pt`."""
Offsets = Mapping[str, Sequence[int]]
"""Place of a tensor's first element in the whole tensor, by name."""
_Tensors = dict[str, dict[str, Any]]
_Parts = tuple[_Tensors, Offsets, Sequence[tuple[str, Any]]]


class _AsPlanned:
    """Common part of writer and reader: DCP's plans are followed as they are, and DCP chooses neither by a path."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing. One is made for every checkpoint."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


@dataclass(kw_only=True, slots=True)
class Layout:
    """Places of a state's parts in the files of a rank, by the plan that DCP made with all ranks."""

    rank: int
    shapes: list[tuple[Any, ...]]
    plan: planners.SavePlan
    results: list[WriteResult]
    index: dict[str, Any] | None = None
    """The index, at the coordinator."""


class ShardWriter(_AsPlanned, StorageWriter):
    """Passes every rank's parts, and at the coordinator the index, to `write`. A failure is kept for the vote: DCP continues."""

    def __init__(self, folder: Path, write: Write, *, adopted: bool = False, frozen: Collection[Key] = ()) -> None:
        """`adopted`: another program saved the state, which may lack parts that a script has. `frozen`: storages."""
        self.failure: OSError | SpecInvalid | None = None
        self._folder = folder
        self._write = write
        self._adopted = adopted
        self._frozen = frozen

    def write_data(self, plan: planners.SavePlan, planner: planners.SavePlanner) -> Future[list[WriteResult]]:
        """This rank's parts: tensors in one file, other parts in another one."""
        self.layout, parts = self._lay_out(plan, planner)
        self._hand_over_parts(*parts)
        return _done(self.layout.results)

    def fits(self, last: "Layout | None", planner: DefaultSavePlanner, state: dict[str, Any]) -> bool:
        """Lay a state out as the last one, and return whether that is right, so that `repeat` may hand it over."""
        with suppress(Exception):  # DCP reports it
            planner.set_up_planner(state)
            if last is not None and _shapes(planner) == last.shapes:
                self.set_up_storage_writer(False, rank=last.rank)
                self.layout, self._parts = self._lay_out(last.plan, planner)
                self.layout.index = last.index
                return self.layout.results == last.results
        return False

    def repeat(self) -> None:
        """Hand over a state that fits."""
        self._hand_over_parts(*self._parts)
        if self.layout.index is not None:
            self._hand_over(INDEX, lambda: self.layout.index)

    def _lay_out(self, plan: planners.SavePlan, planner: Any) -> "tuple[Layout, _Parts]":
        tensors: _Tensors = {self._tensor_file: {}, self._frozen_file: {}}
        offsets: dict[str, Sequence[int]] = {}
        others: list[tuple[str, Any]] = []
        results = []
        parts: list[tuple[planners.WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]
        grown = _grown_storages([part for item, part in parts if item.tensor_data is not None and _fits(part)])
        first_names: dict[Any, str] = {}
        for item, part in parts:
            name = item.index.fqn
            if item.tensor_data is None or not _fits(part) or _storage(part) in grown or name in offsets:
                place: list[Any] = [self._other_file, len(others)]
                others.append((name, part))
            else:
                first = first_names.setdefault(_memory(part), name) if part.numel() else name
                place = [self._frozen_file if storage_key(part) in self._frozen else self._tensor_file, first]
                if first == name:
                    tensors[place[0]][name] = part
                    offsets[name] = item.tensor_data.chunk.offsets
            results.append(WriteResult(index=item.index, size_in_bytes=0, storage_data=place))
        layout = Layout(rank=self._rank, shapes=_shapes(planner), plan=plan, results=results)
        return layout, (tensors, offsets, others)

    def _hand_over_parts(self, tensors: _Tensors, offsets: Offsets, others: Sequence[tuple[str, Any]]) -> None:
        for file, found in tensors.items():
            content = partial(TensorFile, found, sharding_info({name: offsets[name] for name in found}))
            if found:
                self._hand_over(file, partial(Frozen, content()) if file == self._frozen_file else content)
        if others:
            self._hand_over(self._other_file, lambda: [plain_state(part, at=name) for name, part in others])

    def finish(self, metadata: metadatas.Metadata, results: list[list[WriteResult]]) -> None:
        """The index."""
        places = [result for rank in results for result in rank]
        tensors = {
            name: {
                "dtype": entry.properties.dtype,
                "size": list(entry.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
            }
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, metadatas.TensorStorageMetadata)
        }
        index = {
            "format_version": _FORMAT_VERSION,
            "adopted": self._adopted,
            "tensors": tensors,
            "values": [name for name in metadata.state_dict_metadata if name not in tensors],
            "places": [[one.index.fqn, _plain(one.index.offset), *one.storage_data] for one in places],
            "paths": {name: list(path) for name, path in metadata.planner_data.items()},
        }
        self.layout.index = index
        self._hand_over(INDEX, lambda: plain_state(index, at="index"))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note the names of the rank's files."""
        self._rank = kwargs["rank"]
        self._tensor_file = tensor_file(kwargs["rank"])
        self._frozen_file = f"shard-{kwargs['rank'] + 1:05d}-frozen-00001-of-00001.safetensors"
        self._other_file = f"shards-{kwargs['rank']:05d}.pt"

    def _hand_over(self, name: str, state: Callable[[], Any]) -> None:
        try:
            self._write(self._folder / name, state())
        except (OSError, SpecInvalid) as err:
            self.failure = err


class ShardReader(_AsPlanned, StorageReader):
    """Reads what `ShardWriter` wrote: any number of ranks, each the parts that it needs."""

    def __init__(self, folder: Path) -> None:
        """Read the index. Raise `FormatTooNew` if a newer DLAC wrote it, `CheckpointUnsafe` if it has more than plain values."""
        self._folder = folder
        self.index = load_tensors(folder / INDEX)
        if self.index["format_version"] > _FORMAT_VERSION:
            raise FormatTooNew(
                f"the shards in {str(folder)!r} have format version {self.index['format_version']}, this DLAC reads up to "
                f"{_FORMAT_VERSION}"
            )
        self._places = {
            metadatas.MetadataIndex(name, offset): (file, position)
            for name, offset, file, position in self.index["places"]
        }
        words = (name.split(".") for name in (*self.index["tensors"], *self.index["values"]))
        self._prefixes = {prefix for each in words for prefix in accumulate(each, "{}.{}".format)}

    @property
    def is_adopted(self) -> bool:
        """True if another program saved the state."""
        return bool(self.index.get("adopted"))

    def lacks(self, name: str) -> bool:
        """Return True if an adopted checkpoint has nothing of this name or below it. Loading then leaves it unchanged."""
        return self.is_adopted and name not in self._prefixes

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadatas.Metadata:
        """Return the metadata with which DCP plans."""
        described = {name: _tensor_metadata(entry) for name, entry in self.index["tensors"].items()}
        values = {name: metadatas.BytesStorageMetadata() for name in self.index["values"]}
        paths = {name: tuple(path) for name, path in self.index["paths"].items()}
        return metadatas.Metadata(state_dict_metadata={**described, **values}, planner_data=paths)

    def read_data(self, plan: planners.LoadPlan, planner: planners.LoadPlanner) -> Future[None]:
        """Copy the parts into the existing tensors."""
        by_file: defaultdict[str, list[tuple[Any, planners.ReadItem]]] = defaultdict(list)
        for item in plan.items:
            file, position = self._places[item.storage_index]
            by_file[file].append((position, item))
        for file, wanted in by_file.items():
            part_at = _part_reader(self._folder / file)
            for position, item in wanted:
                part = part_at(position)
                if item.type == planners.LoadItemType.BYTE_IO:
                    planner.load_bytes(item, copy.deepcopy(part))  # its tensors are in a file that may be overwritten
                    continue
                target = planner.resolve_tensor(item).detach()
                target.copy_(part[box(item.storage_offsets, item.lengths)])
                planner.commit_tensor(item, target)
        return _done(None)

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the index is read."""


class PlainSavePlanner(DefaultSavePlanner):
    """Leaves values that are no tensors as they are."""

    def transform_object(self, write_item: planners.WriteItem, object: Any) -> Any:
        """Return the object or tensor to write."""
        is_object = write_item.type == planners.WriteItemType.BYTE_IO
        return object if is_object else super().transform_object(write_item, object)


class PlainLoadPlanner(DefaultLoadPlanner):
    """Takes values that are no tensors as they are."""

    def load_bytes(self, read_item: planners.ReadItem, value: Any) -> None:
        """Put it where it belongs."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], value)


def _shapes(planner: Any) -> list[tuple[Any, ...]]:
    """Return what a plan depends on: the names of a state, and the kind, shape and shares of each tensor."""
    return [
        (name, planner.mappings[name], type(value), value.shape, value.dtype)
        + ((value.placements, value.device_mesh) if isinstance(value, DTensor) else ())
        if isinstance(value, torch.Tensor)
        else (name, planner.mappings[name])
        for name, value in planner.state_dict.items()
    ]


def whole_tensors(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """The tensors of one part, put together from all ranks' shards, by the names that they have in it."""
    index = ShardReader(folder).index
    paths = {name: path for name, path in index["paths"].items() if path[0] == part and name in index["tensors"]}
    whole = {name: torch.empty(index["tensors"][name]["size"], dtype=index["tensors"][name]["dtype"]) for name in paths}
    by_file: defaultdict[str, list[tuple[str, list[int], Any]]] = defaultdict(list)
    for name, offset, file, position in index["places"]:
        if name in whole:
            by_file[file].append((name, offset or [0] * whole[name].dim(), position))
    for file, wanted in by_file.items():
        part_at = _part_reader(folder / file)
        for name, offset, position in wanted:
            shard = part_at(position)[()]
            whole[name][box(offset, shard.shape)] = shard
    return {".".join(map(str, paths[name][1:])): tensor for name, tensor in whole.items()}


def _fits(part: Any) -> bool:
    """Return True if a safetensors file can contain the part of a state."""
    return type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout == torch.strided and part.dtype in DTYPES


def _storage(part: torch.Tensor) -> int:
    return part.untyped_storage().data_ptr()


def _memory(part: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common if they are one, under two names."""
    place = (_storage(part), part.storage_offset(), part.size(), part.stride())
    return (*place, part.dtype, part.is_conj(), part.is_neg())


def _grown_storages(parts: Sequence[torch.Tensor]) -> set[int]:
    """Return the storages that would take more bytes in a safetensors file than in memory, such as expanded tensors do."""
    views = {_memory(part): part for part in parts}.values()
    wanted: defaultdict[int, int] = defaultdict(int)
    for part in views:
        wanted[_storage(part)] += part.nbytes
    return {_storage(part) for part in views if wanted[_storage(part)] > part.untyped_storage().nbytes()}


def _part_reader(path: Path) -> Callable[[Any], Any]:
    """Return a function from the place of a part in the file, a name or a number, to the part. Tensors are read when indexed."""
    file: Any = safe_open(path, "pt") if path.suffix == ".safetensors" else load_tensors(path, mmap=True)
    found: Callable[[Any], Any] = file.__getitem__ if isinstance(file, list) else file.get_slice
    return found


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _plain(size: torch.Size | None) -> list[int] | None:
    return None if size is None else list(size)


def _tensor_metadata(entry: dict[str, Any]) -> metadatas.TensorStorageMetadata:
    chunks = [metadatas.ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in entry["chunks"]]
    properties = metadatas.TensorProperties(dtype=entry["dtype"])
    return metadatas.TensorStorageMetadata(properties=properties, size=torch.Size(entry["size"]), chunks=chunks)
