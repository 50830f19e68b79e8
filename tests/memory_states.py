"""Memory states for tests: a rank's part of a state, its files in a node's memory, and the job and resume point of the node."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart, FromMemory, ResumePoint
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import RankState, Trained
from dlac_pipeline.spec.job_spec import JobSpec
from tests.resume_points import memory_point
from tests.small_records import small_spec

HERE = "127.0.0.1"
OWN = f"dlac-{os.getuid()}"
"""Folder of this user's memory states."""


def trained(since: int) -> Trained:
    """Return three steps after `since`."""
    return Trained(since=since, losses=[0.5] * 3, skipped=[], advances=[])


_POINT: dict[str, Any] = {"attempt": 2, "nonce": "b", "head": "c10", "step": 13, "leg": "{}", "saved_at": 5.0}
_RANKS: dict[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "mesh": {},
    "readers": 1,
    "groups": [0],
    "cursors": [],
    "rows": 96,
}
_ENGINE: dict[str, Any] = {"engine": "torch", "loads_own_files": True, "files": [("a.pt", 3)]}
STATE = RankState(**_POINT, **_RANKS, **_ENGINE, trained=[trained(10)])


def spec_of(folder: Path) -> JobSpec:
    """Return the job of a node whose memory is a folder."""
    folder.mkdir(exist_ok=True)
    order = {"batch_size": 4, "key_groups": 4, "steps": 1}
    launch = {"nodes": "1:9", "rendezvous": f"{HERE}:1", "node_timeout_s": 3}
    return small_spec(order=order, checkpoint={"memory": str(folder)}, launch=launch).resolved(folder)


def part_of(rank: int, *, world_size: int = 3, step: int = 13, **changes: Any) -> RankState:
    """Return a rank's part of a state with one file."""
    files = [(f"part/{rank}.pt", 1000 + step)]
    return replace(STATE, rank=rank, world_size=world_size, step=step, files=files, **changes)


def keep(folder: Path, part: RankState, *, slot: int = 0) -> None:
    """Write a part into the memory of a node, as a rank does."""
    place = states.slot_of(states.attempt_folder(folder, part.attempt, part.nonce), slot)
    states.make_folder(place)
    for name, size in part.files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(bytes([part.rank, part.step]) * (size // 2) + bytes(size % 2))
    states.write_seal(place, part)


def fresh_start() -> FreshStart:
    """Return the resume point of attempt 3 at no state."""
    return FreshStart(attempt=3, nonce="c", leg="{}", leg_is_new=False)


def point_of(state: states.MemoryState) -> FromMemory:
    """Return the resume point of attempt 3 at a state in memory."""
    first = state.first
    return memory_point(step=first.step, folder=str(state.folder), world_size=first.world_size, sources=state.sources)


def folder_in(point: ResumePoint | None) -> Path:
    """Return the folder of a resume point at a state in memory."""
    assert isinstance(point, FromMemory)
    return Path(point.folder)
