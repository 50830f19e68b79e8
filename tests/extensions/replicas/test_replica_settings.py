from typing import Any

import pytest

from dlac_pipeline.checkpoint.step_sync import RankReport
from dlac_pipeline.extensions.replicas.checkpointing import StepHistory
from dlac_pipeline.extensions.replicas.group import Reduced
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

pytestmark = pytest.mark.usefixtures("only_this_process")


def spec(**launch: Any) -> JobSpec:
    """Return a job spec with these settings of the launch."""
    raw = {"run": "r", "source": {"table": "src.t", "columns": ["x"]}, "order": {"batch_size": 32}}
    return parse_spec({**raw, "launch": {"script": "train.py", **launch}}, origin="the test")


def history_of(*groups: tuple[int, ...], first_step: int = 1) -> StepHistory:
    """Return the history of steps in which these groups took part. The loss of a step is its number."""
    history = StepHistory()
    for step, present in enumerate(groups, start=first_step):
        history.add(step, Reduced(loss=float(step), report=RankReport(), head_step=0, groups=present))
    return history


def test_each_replica_group_has_ranks() -> None:
    """The supervisor starts the ranks of all groups, whose number need not divide the batch."""
    assert spec(replicas=3).launch.world_size == 3
    assert spec(replicas=3, ranks_per_replica=4).launch.world_size == 12


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"replicas": 33}, "at most 32 ranks of replica groups"),
        ({"ranks_per_replica": 2}, "expected launch.replicas with launch.ranks_per_replica = 2"),
        ({"replicas": 3, "world_size": 2}, "launch.replicas or launch.world_size, found 3 and 2"),
        ({"replicas": 3, "on": "slurm"}, "without launch.on,"),
        ({"replicas": 3, "nodes": "2"}, "divides launch.replicas = 3 .* found '2' and 0"),
        ({"replicas": 4, "nodes": "1:2"}, "one launch.nodes that divides"),
        ({"replicas": 4, "nodes": "2", "ranks_per_replica": 3, "nproc_per_node": 2}, "as many groups of 3 ranks"),
    ],
)
def test_unsupported_replicas_are_refused(launch: dict[str, Any], message: str) -> None:
    """A setting that needs messages of all ranks, or another node, has no meaning for replica groups."""
    with pytest.raises(SpecInvalid, match=message):
        spec(rendezvous="127.0.0.1:1", **launch)


def test_membership_is_recorded_at_changes() -> None:
    """A checkpoint records the groups of the first step of the attempt, and each change after the checkpoint before."""
    history = history_of((0, 1), (0, 1), (0,), (0, 1))
    assert list(history.memberships(0, ())) == [(1, (0, 1)), (3, (0,)), (4, (0, 1))]
    history.forget(2)
    assert list(history.memberships(2, (0, 1))) == [(3, (0,)), (4, (0, 1))]
    assert list(history.memberships(3, (0, 1))) == []
    history.forget(4)
    assert list(history.memberships(4, (0, 1))) == []


def test_newcomer_records_as_its_peer() -> None:
    """A newcomer that becomes the committer records what its peer would have recorded."""
    peer, newcomer = history_of((0, 1), (0,), (0,), first_step=7), history_of((1,))
    newcomer.load(peer.to_records())
    assert newcomer.losses(7) == [8.0, 9.0]
    assert list(newcomer.memberships(6, ())) == list(peer.memberships(6, ()))
