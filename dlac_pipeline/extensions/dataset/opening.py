"""Opening of a dataset: a job spec or single settings in, a new plan or the position of a state."""

import json
import logging
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import torch.distributed as dist
from pydantic import BaseModel

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.data_parallel import shared_dimensions
from dlac_pipeline.elastic.ranks.this_process import this_process
from dlac_pipeline.extensions.dataset.batches import ABOUT, LAST_BATCHES, LastBatch
from dlac_pipeline.extensions.dataset.dataset import DlacDataset
from dlac_pipeline.extensions.dataset.state import check_requested, read_state
from dlac_pipeline.lakehouse.config import LakehouseConfig, home_folder
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.plan.legs.choice import check_tokens, first_leg, plan_sources
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.slots import ALL_SLOTS, DataCoordinate
from dlac_pipeline.spec import job_spec

_log = logging.getLogger(__name__)


def open_dataset(
    spec: job_spec.JobSpec | str | Path | None = None,
    *,
    home: str | Path | None = None,
    lakehouse: Lakehouse | LakehouseConfig | None = None,
    rank: SupportsIndex | None = None,
    world_size: SupportsIndex | None = None,
    state: Mapping[str, Any] | str | Path | None = None,
    last_batch: LastBatch = "partial",
    **settings: Any,
) -> DlacDataset:
    """Return this rank's dataset over a job spec, or over `table`, `columns`, `batch_size` and further settings.

    `batch_size` is the size of the global batch. A rank's batch has batch_size / world_size samples. Rank and world size default
    to torch.distributed's where it is initialized, then to RANK and WORLD_SIZE, then to one rank. A share by these
    variables is logged, as a warning unless torchrun set them: `rank=0, world_size=1` reads all rows whatever they are. Under
    torch.distributed every rank calls this: rank 0 plans and shares the plan. `state`, or the folder or file that contains
    one, opens at that position, on the snapshot that it names. Without it the table's current snapshot is pinned and planned.

    `last_batch` decides on batches for which too few samples are left. Every rank has the same number of batches in all
    three:

    - "partial" gives their samples only, so ranks may have different numbers of samples, or none;
    - "drop" leaves them out on all ranks;
    - "pad" fills them up with zero rows, which batch["dlac"]["valid"] marks as False.

    Raises:
        SpecInvalid: a setting is unknown or wrong, or the ranks do not divide the batch size.
        ResumeMismatch: `state` was read with other settings.
        BadInput, LakehouseError: as from planning and opening.
    """
    _check_types(spec=spec, home=home, lakehouse=lakehouse, state=state)
    job = _spec_of(spec, settings, lakehouse).resolved(Path(home) if home is not None else home_folder())
    _check_readable(job, last_batch)
    coordinate = _share(rank, world_size, job.order.batch_size)
    is_own = dist.is_initialized() and coordinate == DataCoordinate(dist.get_rank(), dist.get_world_size())
    joined = coordinate.count > 1 and is_own
    group = dist.new_group(backend="gloo") if joined else None
    saved = read_state(state) if state is not None else None
    leg, plans = _plan_leg(job, group) if saved is None else (Leg.from_json(saved["leg"]["json"]), None)
    dataset = DlacDataset(job, leg, coordinate=coordinate, group=group, last_batch=last_batch, plans=plans)
    if saved is not None:
        check_requested(job, leg)
    dataset.load_state_dict(dataset.state_dict() if saved is None else saved)
    if last_batch == "drop":
        _check_not_empty(dataset)
    return dataset


def _share(rank: SupportsIndex | None, world_size: SupportsIndex | None, batch_size: int) -> DataCoordinate:
    """Return the share of this rank. One that the environment chose is logged."""
    is_named = rank is not None and world_size is not None
    own = ALL_SLOTS if is_named else _own_share()
    coordinate = DataCoordinate(
        own.index if rank is None else _whole("rank", rank),
        own.count if world_size is None else _whole("world_size", world_size),
    )
    _check_share(coordinate, batch_size)
    if coordinate.count > 1 and not is_named and not dist.is_initialized():
        _log_share(coordinate)
    return coordinate


def _check_readable(spec: job_spec.JobSpec, last_batch: str) -> None:
    """Refuse requests of a spec that training_run can fulfil and a dataset cannot, and check `last_batch`."""
    if last_batch not in LAST_BATCHES:
        raise SpecInvalid(f"expected last_batch to be one of {LAST_BATCHES!r}, found {last_batch!r}: correct it")
    if spec.source.follows:
        raise SpecInvalid(
            f'expected sources with follow = "pinned", found "{spec.source.follow}": set "pinned", or train with training_run, '
            "which alone can start new legs"
        )
    if any(ABOUT in source.columns and not source.transform for source in spec.sources) and not spec.sequences.length:
        raise SpecInvalid(f"expected columns of other names than {ABOUT!r}, found it: let a transform rename it")
    check_tokens(spec.sequences)


def _check_not_empty(dataset: DlacDataset) -> None:
    """Check that a dataset without its last batch has another one, where that can be known before reading."""
    leg = dataset.leg
    if not any(leg.streamed) and leg.steps is None and not len(dataset):
        raise SpecInvalid(
            f"expected enough rows for one batch of {leg.batch_size}, found fewer: last_batch='drop' would leave none; set a "
            "smaller batch_size, or last_batch='partial'"
        )


_TYPES: dict[str, tuple[type, ...]] = {
    "spec": (job_spec.JobSpec, str, Path),
    "home": (str, Path),
    "lakehouse": (Lakehouse, LakehouseConfig),
    "state": (Mapping, str, Path),
}


def _check_types(**arguments: object) -> None:
    """Raise `SpecInvalid` for an argument of a wrong type that is no setting. The job spec checks the types of settings."""
    for name, value in arguments.items():
        wanted = _TYPES[name]
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            listed = ", ".join(each.__name__ for each in wanted)
            raise SpecInvalid(f"expected {name} of open_dataset() to be one of {listed}, found {value!r}: correct it")


def _spec_of(
    spec: job_spec.JobSpec | str | Path | None,
    settings: Mapping[str, Any],
    lakehouse: Lakehouse | LakehouseConfig | None,
) -> job_spec.JobSpec:
    if spec is None:
        raw: dict[str, Any] = {"run": "dataset", "launch": {"script": "-"}, **_sections(settings)}
        job = job_spec.parse_spec(raw, origin="what open_dataset() was given")
    elif settings:
        raise SpecInvalid(f"expected a job spec or single settings, found both: {sorted(settings)!r}")
    else:
        job = spec if isinstance(spec, job_spec.JobSpec) else job_spec.read_spec(Path(spec))
    if lakehouse is None:
        return job
    config = lakehouse.named if isinstance(lakehouse, Lakehouse) else lakehouse
    return job.model_copy(update={"lakehouse": config})


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    homes: dict[str, type[BaseModel]] = {
        "source": job_spec.SourceSpec,
        "order": job_spec.OrderSpec,
        "sequences": job_spec.SequenceSpec,
        "read": job_spec.ReadSpec,
    }
    found: dict[str, Any] = {"source": {}, "order": {}}
    for name, value in settings.items():
        home = next((section for section, model in homes.items() if name in model.model_fields), None)
        if home is None and name != "mixture":
            known = sorted({field for model in homes.values() for field in model.model_fields})
            raise SpecInvalid(f"expected settings of {known!r} or 'mixture', found {name!r}")
        if home is None:
            found[name] = value
        else:
            found.setdefault(home, {})[name] = value
    return found


def _whole(name: str, value: SupportsIndex) -> int:
    """Return an integer of any library as Python's. Raises `SpecInvalid` for anything else, such as a bool or 1.0."""
    try:
        if str(getattr(value, "dtype", type(value).__name__)).endswith("bool"):
            raise TypeError("a bool")
        return operator.index(value)
    except TypeError as err:
        raise SpecInvalid(
            f"expected {name} of open_dataset() to be an integer, found {value!r} of type {type(value).__name__}: give an int"
        ) from err


def _check_share(coordinate: DataCoordinate, batch_size: int) -> None:
    rank, readers = coordinate.index, coordinate.count
    if not (0 <= rank < readers and batch_size % readers == 0):
        raise SpecInvalid(
            f"expected 0 <= rank < world_size, and a world_size that divides the batch size {batch_size}, found rank "
            f"{rank!r} of {readers!r}: correct them, or batch_size"
        )


def _own_share() -> DataCoordinate:
    """Return the share of this process. Raises `SpecInvalid` if RANK or WORLD_SIZE is no number."""
    if not dist.is_initialized():
        return this_process().coordinate
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for mesh, name, size in shared_dimensions():
        raise SpecInvalid(
            f"expected the share as rank and world_size of open_dataset(), because the {size} ranks of {name!r} in the mesh "
            f"{mesh.mesh_dim_names!r} read one, found none: pass the data-parallel rank and size"
        )
    return DataCoordinate(rank, ranks)


def _log_share(coordinate: DataCoordinate) -> None:
    """Log that the environment chose the share of the rows. A shell may have variables of an earlier job."""
    _log.log(
        logging.INFO if "TORCHELASTIC_RUN_ID" in os.environ else logging.WARNING,
        "open_dataset() reads the share of rank %d of %d, because RANK is %r and WORLD_SIZE is %r in the environment: pass "
        "rank=0 and world_size=1 to read all rows, or unset them",
        *(coordinate.index, coordinate.count, os.environ.get("RANK"), os.environ.get("WORLD_SIZE")),
    )


def _plan_leg(spec: job_spec.JobSpec, group: dist.ProcessGroup | None) -> tuple[Leg, Plans | None]:
    """Return the leg that the spec requests, on the current snapshot. In a group rank 0 plans, and keeps its plans."""
    answer: dict[str, str] | None = None
    plans: Plans | None = None
    failed: DlacError | None = None
    if group is None or dist.get_rank() == 0:
        try:
            plans = Plans(connect(spec.lakehouse, tables=spec.own_tables))
            added = [plans.add(plan) for plan in plan_sources(plans.lakehouse, spec)]
            answer = {"leg": first_leg(spec, added).to_json()}
        except DlacError as err:
            failed, answer = err, {"error": str(err)}
    tree = RankTree(0, 1, None) if group is None else RankTree(dist.get_rank(), dist.get_world_size(), group)
    found = json.loads(tree.broadcast(None if answer is None else json.dumps(answer).encode()))
    if failed is not None:
        raise failed
    if "error" in found:
        raise TrainingFailed(f"rank 0 could not plan the dataset: {found['error']}")
    return Leg.from_json(found["leg"]), plans
