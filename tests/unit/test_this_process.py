"""A process among the processes of its job, by the variables of its launcher."""

import pytest

from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE, ThisProcess, this_process
from dlac_pipeline.extensions.replay.step_rows import reader_of
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.spec.mesh_spec import MeshSpec

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", GROUP_VARIABLE)


@pytest.mark.parametrize(
    ("environment", "found", "rank_of_all"),
    [
        ({}, ThisProcess(), 0),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            ThisProcess(rank=5, world_size=8, has_rank=True, local_rank=1, ranks_here=4),
            5,
        ),
        (  # the `deepspeed` launcher
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            ThisProcess(rank=5, world_size=8, has_rank=True, local_rank=1),
            5,
        ),
        (  # a supervisor counts LOCAL_RANK through all groups, torchrun in its own
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "2", GROUP_VARIABLE: "2"},
            ThisProcess(rank=1, world_size=2, has_rank=True, group=2, local_rank=1, ranks_here=2),
            5,
        ),
    ],
)
def test_launchers_number_a_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: ThisProcess, rank_of_all: int
) -> None:
    """Ranks count in their process group, and among all groups of the attempt if there are several."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_process() == found
    assert found.rank_of_all == rank_of_all


def test_processes_of_a_replica_share_a_coordinate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each two of six processes read one of three shares, and the first reports it. A number with a rest is refused."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    found = []
    for rank in range(6):
        monkeypatch.setenv("RANK", str(rank))
        process = this_process(MeshSpec(tp=2))
        found.append((process.coordinate, process.speaks))
    assert found == [(DataCoordinate(index, 3), first) for index in range(3) for first in (True, False)]
    with pytest.raises(SpecInvalid, match=r"a multiple of the 4 ranks of a replica in launch\.mesh, found 6"):
        this_process(MeshSpec(tp=2, pp=2))


def test_slot_names_its_rank() -> None:
    """Each slot has one rank, the one whose slots have it, where the number of ranks divides the batch and where not."""
    for batch_size in range(1, 33):
        for ranks in range(1, batch_size + 1):
            shares = [DataCoordinate(place, ranks).slots(batch_size) for place in range(ranks)]
            named = [reader_of(slot, ranks, batch_size) for slot in range(batch_size)]
            assert named == [place for place, slots in enumerate(shares) for _ in slots]
