"""Endings of attempts that count as failures, and endings that do not."""

from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.spec.mesh_spec import MeshSpec
from dlac_pipeline.supervise.failure import failure_of_attempt, rows_worked_on
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, Spent, rows_of_readers
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter

MOMENTS = {"noticed_at": 9.0, "launched_at": 9.0, "stopped_at": 9.0}


def rows(*reasons: str | None, **claim: Any) -> list[LedgerRow]:
    """Return the claim of attempt 1 and its checkpoints. None is a checkpoint without a reason."""
    return [ClaimRow(attempt=1, **claim), *(CheckpointRow(attempt=1, reason=reason) for reason in reasons)]


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1", "termination_url", "end"])
def test_stopped_run_has_not_failed(reason: str) -> None:
    """A run that a person starts again has no incident. A run that a sensor starts again was preempted, and has one."""
    stopped = rows("steps", reason)
    assert failure_of_attempt(stopped, 1, noticed_by=OPERATOR, **MOMENTS) is None
    preempted = failure_of_attempt(stopped, 1, noticed_by="preemption_sensor", **MOMENTS)
    assert preempted is not None
    assert preempted.cause == "attempt 1 ended without finishing"


def test_run_without_new_rows_has_not_failed(tmp_path: Path) -> None:
    """A launch that has caught up commits nothing. Its ranks have reported that they are done."""
    writer = HeartbeatWriter(tmp_path, 0)
    writer.doing(Phase.TRAINING, 3)
    claimed = rows(launch_folder=str(tmp_path))
    assert failure_of_attempt(claimed, 1, noticed_by=OPERATOR, **MOMENTS) is not None
    writer.doing(Phase.DONE, 3)
    assert failure_of_attempt(claimed, 1, noticed_by=OPERATOR, **MOMENTS) is None
    writer.close()


@pytest.mark.parametrize("reasons", [(), ("steps",), ("seconds",), ("SIGTERM", "auto"), (None,)])
def test_interrupted_run_has_failed(reasons: tuple[str | None, ...]) -> None:
    """Training continued after the last checkpoint, if there is one."""
    assert failure_of_attempt(rows(*reasons), 1, noticed_by=OPERATOR, **MOMENTS) is not None


def test_lost_node_had_the_rows_of_others() -> None:
    """The last report of a lost node is some steps old, or missing. Its ranks took part in the steps of all ranks."""
    heard = [RankHeartbeat(each, Phase.TRAINING, 0.0, 0, 0.0, Spent(rows=12 * each)) for each in (10, 10, 6, 11)]
    assert rows_worked_on(heard[:3], silent=()) == 312
    assert rows_worked_on(heard[:3], silent={2}) == 360
    assert rows_worked_on([*heard[:2], None, heard[3]], silent={2, 3}) == 492
    assert rows_worked_on(heard[2:3], silent={0}) == 72


def test_shared_rows_count_once() -> None:
    """The first of two ranks counts the rows of their share, whether its partner or a whole reader is silent."""
    heard = [RankHeartbeat(9, Phase.TRAINING, 0.0, 0, 0.0, Spent(rows=rows)) for rows in (90, 0, 80, 0)]
    assert rows_worked_on(heard, silent={1}, mesh=MeshSpec(tp=2)) == 170
    assert rows_worked_on(heard, silent={2, 3}, mesh=MeshSpec(tp=2)) == 180
    assert rows_of_readers(heard[:1], world_size=4, mesh=MeshSpec(tp=2)) == 180
    assert rows_of_readers(heard[1:2], world_size=4, mesh=MeshSpec(tp=2)) == 0
    assert rows_of_readers(heard[:2], world_size=4, mesh=MeshSpec(tp=2)) == 180
