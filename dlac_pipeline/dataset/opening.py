"""From a job spec or single settings to a dataset: plans, or goes on where a state stands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel

from catalog.connect import Lakehouse, connect
from catalog.errors import DlacError, SpecInvalid, TrainingFailed
from catalog.lakehouse_config import LakehouseConfig
from dlac_pipeline.dataset.dataset import DlacDataset
from dlac_pipeline.dataset.state import check_asked, read_state
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.legs import first_leg
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec import (
    JobSpec,
    OrderSpec,
    ReadSpec,
    SequenceSpec,
    SourceSpec,
    home_folder,
    parse_spec,
    read_spec,
)


def open_dataset(
    spec: JobSpec | str | Path | None = None,
    *,
    home: str | Path | None = None,
    lakehouse: Lakehouse | LakehouseConfig | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    state: Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> DlacDataset:
    """This rank's dataset over what a job spec names, or over `table`, `columns`, `batch_size` and further settings of one.

    `batch_size` is that of the global batch; a rank's batch has batch_size / world_size samples. Rank and world size default to
    those of torch.distributed where it is initialised, then to RANK and WORLD_SIZE, then to one rank. Under torch.distributed
    every rank calls this: rank 0 plans, and tells the others. `state`, or the folder or file that holds one, opens at that
    position, on the snapshot that it names; without it the table's current snapshot is pinned and planned.

    Raises:
        SpecInvalid: a setting is unknown or wrong, or the ranks do not divide the batch size.
        ResumeMismatch: `state` was read with other settings.
        BadInput, LakehouseError: as from planning and opening.
    """
    asked = _spec_of(spec, settings, lakehouse).resolved(Path(home) if home is not None else home_folder())
    if any(source.follow != "pinned" for source in asked.sources):
        raise SpecInvalid(
            'expected sources with follow = "pinned", found "appends": only training_run goes on to new legs'
        )
    own_rank, own_world_size = _own_place()
    rank = own_rank if rank is None else rank
    world_size = own_world_size if world_size is None else world_size
    if not 0 <= rank < world_size or asked.order.batch_size % world_size:
        raise SpecInvalid(
            f"expected 0 <= rank < world_size, and a world_size that divides the batch size {asked.order.batch_size}, "
            f"found rank {rank} of {world_size}"
        )
    joined = world_size > 1 and dist.is_initialized() and (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    group = dist.new_group(backend="gloo") if joined else None
    saved = read_state(state) if state is not None else None
    leg = _planned(asked, group) if saved is None else Leg.from_json(saved["leg"]["json"])
    dataset = DlacDataset(asked, leg, rank=rank, world_size=world_size, group=group)
    if saved is not None:
        check_asked(asked, leg)
    dataset.load_state_dict(dataset.state_dict() if saved is None else saved)
    return dataset


def _spec_of(
    spec: JobSpec | str | Path | None, settings: Mapping[str, Any], lakehouse: Lakehouse | LakehouseConfig | None
) -> JobSpec:
    """The job spec that is named, or one of single settings."""
    if spec is None:
        raw: dict[str, Any] = {"run": "dataset", "launch": {"script": "-"}, **_sections(settings)}
        asked = parse_spec(raw, origin="what open_dataset() was given")
    elif settings:
        raise SpecInvalid(f"expected a job spec or single settings, found both: {sorted(settings)!r}")
    else:
        asked = spec if isinstance(spec, JobSpec) else read_spec(Path(spec))
    if lakehouse is None:
        return asked
    config = lakehouse.config if isinstance(lakehouse, Lakehouse) else lakehouse
    return asked.model_copy(update={"lakehouse": config})


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting in the section that knows it."""
    homes: dict[str, type[BaseModel]] = {
        "source": SourceSpec,
        "order": OrderSpec,
        "sequences": SequenceSpec,
        "read": ReadSpec,
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


def _own_place() -> tuple[int, int]:
    """(rank, world size) of this process."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _planned(spec: JobSpec, group: dist.ProcessGroup | None) -> Leg:
    """The leg that the spec asks for, on the snapshot that is current now; in a group rank 0 says which one that is."""
    said: list[Any] = [None]
    failed: DlacError | None = None
    if group is None or dist.get_rank() == 0:
        try:
            lakehouse = connect(spec.lakehouse)
            leg = first_leg(spec, [make_plan(lakehouse, source) for source in spec.sources])
            said = [{"leg": leg.to_json()}]
        except DlacError as err:
            failed, said = err, [{"error": str(err)}]
    if group is not None:
        dist.broadcast_object_list(said, src=0, group=group)
    if failed is not None:
        raise failed
    if "error" in said[0]:
        raise TrainingFailed(f"rank 0 could not plan the dataset: {said[0]['error']}")
    return Leg.from_json(said[0]["leg"])
