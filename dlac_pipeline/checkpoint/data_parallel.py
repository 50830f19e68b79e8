"""Check that the meshes and the model of a script are those of the run: launch.mesh, and data parallelism beside it.

Ranks that share a batch against the spec would record its rows once for each rank, and stages would resume with the first one.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import torch
from blake3 import blake3
from torch.nn import Module

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.lakehouse.errors import ScriptInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.spec.mesh_spec import MeshSpec

_DIMENSIONS = {
    **{"tp": "tp", "tensor": "tp", "sp": "tp", "sequence": "tp"},
    **{"pp": "pp", "pipeline": "pp", "cp": "cp", "context": "cp"},
}
"""Name of a mesh dimension whose ranks share a batch, without "_parallel" -> its setting of launch.mesh."""
_WAY_OUT = "set launch.mesh as the script splits the model, or train with data parallelism alone"
EVERY = 1000
"""Batches until the next one that ranks of one share compare."""
_TOLERANCE = 0.05
"""Difference of the sums of two ranks' weights, in norms of them, that no rounding makes."""


def check_layout(engine: Engine, tree: RankTree, spec: MeshSpec) -> None:
    """Check the meshes of a script and the layout of its model before it is loaded. Collective.

    Raise `ScriptInvalid` if a mesh splits the model otherwise than the spec, or a rank has other parameters than the first rank
    of its stage.
    """
    if tree.world_size == 1:
        return
    own = spec.coordinates(tree.rank, tree.world_size)
    with failing_together(tree, doing="checking the meshes of the script"):
        for mesh, name, size in shared_dimensions():
            _check_dimension(mesh, name, size, spec, own)
        for name, parameter in _parameters(engine) if spec.replica_ranks == 1 else ():
            _check_mesh(name, parameter, tree.world_size)
    if engine.name == "torch":
        _check_whole(engine, tree)
    if engine.name in ("torch", "dcp"):
        layout = [(name, list(parameter.shape), str(parameter.dtype)) for name, parameter in _parameters(engine)]
        # rank 0 saves what is replicated, so all ranks have the same of it
        is_dcp = engine.name == "dcp"
        way_out = (
            _WAY_OUT if is_dcp or spec.pp == 1 else "use dlac.DistributedState, which takes the stages of a pipeline"
        )
        _compare(tree, layout, _other_layout, stage=own["pp"] if is_dcp else 0, way_out=way_out)


def check_weights_agree(engine: Engine, tree: RankTree, spec: MeshSpec) -> None:
    """Check that the ranks of replicated state have the same weights after a step. Collective.

    Raise `ScriptInvalid` if they differ by more than rounding, so that no rank could resume with the weights of rank 0, or if
    stages have other weights of one name, of which a checkpoint would keep those of one stage.
    """
    if spec.pp > 1:
        engine.check_stages(tree, stage=spec.coordinates(tree.rank, tree.world_size)["pp"])
    if tree.world_size == 1 or engine.name != "torch":
        return
    trained = [(name, each) for name, each in _parameters(engine) if each.requires_grad and each.is_floating_point()]
    sums = [_sum_and_norm(each.detach()) for _, each in trained]
    found = torch.stack([number.cpu() for pair in sums for number in pair]).tolist() if sums else []
    names = [name for name, _ in trained]
    _compare(tree, list(zip(names, found[::2], found[1::2], strict=True)), _other_weights)


def _check_whole(engine: Engine, tree: RankTree) -> None:
    """Raise `ScriptInvalid` at all ranks if a tensor is split, which `TorchState` cannot keep: it saves that of rank 0."""
    with failing_together(tree, doing="checking the state of the script"):
        split = next((name for name, each in _parameters(engine) if hasattr(each, "placements")), None)
        if split is not None:
            raise ScriptInvalid(
                f"expected the whole model on each rank in dlac.TorchState, found {split!r}, of which each rank has a part: use "
                "dlac.DistributedState(model=..., optimizer=...)"
            )


def _sum_and_norm(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the precision of the weights or in single precision: a conversion takes 20 times as long as a sum."""
    precision = torch.promote_types(weights.dtype, torch.float32)
    return weights.sum(dtype=precision), weights.norm(dtype=precision)


def _compare(
    tree: RankTree,
    mine: list[Any],
    difference: Callable[[list[Any], list[Any]], str | None],
    *,
    stage: int = 0,
    way_out: str = _WAY_OUT,
) -> None:
    """Raise the first difference between the first rank of a stage and another one at all ranks. Collective."""
    gathered = tree.gather(msgpack.packb([stage, mine]))
    with failing_together(tree, doing="comparing the models of the ranks"):
        firsts: dict[int, list[Any]] = {}
        for rank, (found_stage, found) in enumerate(map(msgpack.unpackb, gathered or [])):
            first = firsts.setdefault(found_stage, found)
            # a part may exist on rank 0 only, such as an average of the weights
            parts = {_part_of(each) for each in first} & {_part_of(each) for each in found}
            what = difference(*([each for each in side if _part_of(each) in parts] for side in (first, found)))
            if what is not None:
                raise ScriptInvalid(
                    f"expected the same model on all {tree.world_size} ranks, found that rank {rank} has {what}: {way_out}"
                )


def _part_of(described: list[Any]) -> str:
    return str(described[0]).partition(".")[0]


def _other_layout(first: list[Any], found: list[Any]) -> str | None:
    other = [name for name, *_ in found if name not in {each[0] for each in first}]
    if other:
        return f"{other[0]!r}, which the first rank has not"
    return f"{len(found)} parameters, and the first rank other ones, {len(first)}" if found != first else None


def _other_weights(first: list[Any], found: list[Any]) -> str | None:
    for (name, total, norm), (_, other_total, other_norm) in zip(first, found, strict=True):
        if max(abs(total - other_total), abs(norm - other_norm)) > _TOLERANCE * max(norm, other_norm):
            return f"other weights than rank 0 in {name!r} after a step"
    return None


def _parameters(engine: Engine) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of an engine's modules. A user's own adapter may name none."""
    modules: Mapping[str, Any] = getattr(engine, "modules", dict)()
    for part, module in modules.items():
        if isinstance(module, Module):
            yield from ((f"{part}.{name}", parameter) for name, parameter in module.named_parameters())


def _live_meshes() -> list[Any]:
    """Return the meshes that exist in this process. PyTorch keeps no list of them that is public."""
    device_mesh: Any = sys.modules.get("torch.distributed.device_mesh")
    kind = getattr(device_mesh, "DeviceMesh", None)
    return [each for each in gc.get_objects() if type(each) is kind] if kind is not None else []


def mesh_spec_of(mesh: Any) -> MeshSpec:
    """Return the dimensions of a script's mesh along which ranks share a batch."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    return MeshSpec(**{setting: size for name, size in sizes if size > 1 and (setting := _setting_of(name))})


def shared_dimensions() -> Iterator[tuple[Any, str, int]]:
    """Yield each mesh, name and size of a dimension along which several ranks share a batch."""
    for mesh in _live_meshes():
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
            if size > 1 and _setting_of(name) is not None and mesh.get_coordinate() is not None:
                yield mesh, name, size


def _setting_of(dimension: str) -> str | None:
    return _DIMENSIONS.get(dimension.lower().removesuffix("_parallel"))


def _check_dimension(mesh: Any, name: str, size: int, spec: MeshSpec, own: Mapping[str, int]) -> None:
    """Raise `ScriptInvalid` for a dimension of another size, or other places of ranks, than the spec has."""
    setting = str(_setting_of(name))
    found = f"{name!r} of {size} ranks in {mesh.mesh_dim_names!r} of the shape {tuple(mesh.shape)!r}"
    if getattr(spec, setting) != size:
        raise ScriptInvalid(
            f"expected launch.mesh.{setting} = {size} for the script, whose DeviceMesh has {found}: {_WAY_OUT}"
        )
    if mesh.get_local_rank(name) != own[setting]:
        raise ScriptInvalid(
            f"expected this rank at {own[setting]} in {name!r}, found it at {mesh.get_local_rank(name)}, by {found}: make "
            "the mesh with the dimensions in the order pp, dp, cp, tp, as run.mesh has them"
        )


def _check_mesh(name: str, parameter: Any, world_size: int) -> None:
    """Raise `ScriptInvalid` for a parameter that is not shared out among all ranks as FSDP2 does: replicated, then sharded."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    sharded = [not placement.is_replicate() for placement in parameter.placements]
    if mesh.size() != world_size or sharded != sorted(sharded) or sum(sharded) > 1:
        raise ScriptInvalid(
            f"expected parameters that are sharded over all {world_size} ranks, found {name!r} with {parameter.placements!r} on "
            f"the mesh {mesh.mesh_dim_names or ''!r} of the shape {tuple(mesh.shape)!r}: {_WAY_OUT}"
        )


class SharedBatches:
    """Comparison of the batches of ranks that read one share. `share` is its number.

    The first batch of an attempt is compared, and each `EVERY`-th after it. It is digested before a script can change it, and
    compared once its step is done, when all ranks are at the same place.
    """

    def __init__(self, share: int, tree: RankTree, transforms: list[str]) -> None:
        """`transforms` of the sources are named in a difference."""
        self._share, self._tree, self._transforms = share, tree, transforms
        self._handed = 0
        self._noted: dict[int, dict[str, bytes]] = {}

    def note(self, batch: Batch) -> None:
        """Digest a batch that the reader has handed over, if it is one that is compared."""
        if self._handed % EVERY == 0:
            tensors = {**batch.tensors, "valid": batch.valid} if batch.tensors else {}
            self._noted[batch.step] = {name: _digest(each) for name, each in tensors.items()}
        self._handed += 1

    def compare(self, step: int) -> None:
        """Compare the batch of a finished step, if it was noted. Collective. Raise `ScriptInvalid` if ranks had other values."""
        mine = self._noted.pop(step, None)
        if mine is None:
            return
        gathered = self._tree.gather(msgpack.packb([self._share, mine]))
        with failing_together(self._tree, doing="comparing the batches of the ranks"):
            firsts: dict[int, tuple[int, dict[str, bytes]]] = {}
            for rank, (share, found) in enumerate(map(msgpack.unpackb, gathered or [])):
                if not found:  # a stage that needs no values
                    continue
                first, expected = firsts.setdefault(share, (rank, found))
                if other := sorted(name for name in expected if expected[name] != found.get(name)):
                    cause = (
                        f"the transform {' or '.join(self._transforms)}"
                        if self._transforms
                        else "what the script reads"
                    )
                    raise ScriptInvalid(
                        f"expected the same batch of step {step} on the ranks {first} and {rank} of one replica, found other "
                        f"values in {other[0]!r}: make {cause} deterministic, as with a generator that is seeded by the row"
                    )


def _digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor's bytes, in host memory."""
    return blake3(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
