"""The state of a run's last launch, and its status in a terminal."""

import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.cli.shared import command_with
from dlac_pipeline.extensions.look.commands import describe_incident
from dlac_pipeline.extensions.look.run_state import current_failure, standing_of, total_steps_of
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, FinishRow, LedgerRow
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from tests.small_records import small_recovery

pytestmark = pytest.mark.usefixtures("only_this_process")
LONG_AGO = datetime.now(UTC) - timedelta(hours=3)


def rows(*appended: LedgerRow, run: str = "r") -> list[LedgerRow]:
    """Return rows of a run, in order of `seq`."""
    dated = [replace(row, committed_at=max(row.committed_at, LONG_AGO), attempt=row.attempt or 1) for row in appended]
    return [replace(row, run=run, nonce="n", seq=seq) for seq, row in enumerate(dated, start=1)]


def claim(attempt: int = 1, *, host: str = "", **detail: Any) -> LedgerRow:
    """Return the claim of a launch on this node, unless it names another one."""
    return ClaimRow(attempt=attempt, host=host or socket.gethostname(), **detail)


def checkpoint(step: int, reason: str, attempt: int = 1) -> LedgerRow:
    """Return a checkpoint with its reason."""
    name = f"r-{step}"
    return CheckpointRow(attempt=attempt, checkpoint_id=name, head_after=name, step=step, bytes=1, reason=reason)


def test_held_lock_means_training(tmp_path: Path) -> None:
    """A held lock means that its holder trains, and the status names it. A launch whose lock is free is dead at once."""
    (tmp_path / "r").mkdir()
    mine = rows(claim(local=str(tmp_path)), checkpoint(10, "steps"))
    with run_lock(str(tmp_path), "r", wait_s=0, takeover=False):
        standing = standing_of(mine)
        assert (standing.state, standing.next_command) == ("training", "dlac status r --watch")
    standing = standing_of(mine)
    assert (standing.state, standing.next_command) == ("dead", "dlac recover r --spec FILE")
    assert "last heartbeat 3 h" in standing.note


def test_next_command_needs_spec(tmp_path: Path) -> None:
    """The name of the run is enough if the job spec of the last launch is on this node."""
    folder = tmp_path / "launch-1"
    folder.mkdir()
    mine = rows(claim(local=str(tmp_path), launch_folder=str(folder)), run="a b")
    assert standing_of(mine).next_command == "dlac recover 'a b' --spec FILE"
    (folder / "spec.json").touch()
    assert standing_of(mine).next_command == "dlac recover 'a b'"
    assert command_with("dlac recover r", ("--home", "/a b")) == "dlac recover r --home '/a b'"
    assert command_with("", ("--home", "x")) == ""
    given = command_with("dlac recover r --spec FILE", ("--home", "/lake", "--spec", "job.toml"))
    assert given == "dlac recover r --home /lake --spec job.toml"


@pytest.mark.parametrize(
    ("appended", "state"),
    [
        ((claim(), checkpoint(10, "SIGTERM")), "stopped"),
        ((claim(), checkpoint(10, "left")), "stopped"),
        ((claim(), checkpoint(10, "end")), "caught up"),
        ((claim(), checkpoint(10, "nodes")), "dead"),
        ((claim(), checkpoint(10, "end"), FinishRow()), "finished"),
        ((claim(), checkpoint(10, "auto"), claim(2, purpose="rewinds", origin="r-10")), "rewound"),
        ((claim(purpose="forks", origin={"run": "p"}),), "forked"),
        ((claim(purpose="adopts", origin="x"),), "adopted"),
        ((claim(host="node-7"), checkpoint(10, "steps")), "silent"),
        ((), "unknown"),
    ],
)
def test_endings_have_different_states(appended: tuple[LedgerRow, ...], state: str) -> None:
    """A launch that ended in order is not dead. A node without recent rows is silent. One that has caught up needs no start."""
    standing = standing_of(rows(*appended))
    assert standing.state == state
    assert (standing.command == ("audit", "r")) == (state in ("finished", "caught up"))


def test_recent_commit_elsewhere_means_training() -> None:
    """Recent rows of another node show that it trains. The sensor of an orchestrator recovers its dead launch."""
    fresh = rows(claim(host="node-7"), replace(checkpoint(10, "steps"), committed_at=datetime.now(UTC)))
    assert standing_of(fresh).state == "training"
    assert "node-7" in standing_of(fresh).note
    assert "Dagster run abc" in standing_of(rows(claim(launched_by="abc"))).note


def test_stop_without_checkpoint_is_known(tmp_path: Path) -> None:
    """A launch that was stopped before its first commit recorded the stop in its launch folder."""
    (tmp_path / "events.jsonl").write_text('{"event": "training", "step": 0, "total_steps": 9}\n{"event": "stopped"}\n')
    assert standing_of(rows(claim(launch_folder=str(tmp_path)))).state == "stopped"


def test_replays_raise_total_steps(tmp_path: Path) -> None:
    """The last step is that of the newest record: of the start of an attempt, or of its head, which knows later replays."""
    (tmp_path / "events.jsonl").write_text('{"event": "training", "step": 0, "total_steps": 9}\n')
    begun, head = claim(launch_folder=str(tmp_path)), replace(checkpoint(4, "steps"), total_steps=11)  # type: ignore[call-arg]
    assert [total_steps_of(rows(*each)) for each in ((begun,), (begun, head))] == [9, 11]
    assert total_steps_of(rows(begun, head, claim(2, launch_folder=str(tmp_path)))) == 9


def recovery(**changes: Any) -> Recovery:
    """Return a recovery from the death of a rank."""
    phases = {"detect_s": 0.4, "stop_s": 0.1, "claim_s": 0.2, "verify_s": 0.3, "load_s": 2.0, "first_step_s": 1.0}
    facts = {"seq": 9, "cause": "rank 1 died", "failed_at": LONG_AGO, "resumed_from": "r-10", "resumed_step": 10}
    return small_recovery(**{**facts, **phases, "rows_replayed": 1, "total_s": 4.0, **changes})


def test_gave_up_is_not_dead() -> None:
    """No attempt followed. The status shows the cause, and names the incidents as the next step."""
    standing = standing_of(rows(claim()), [recovery(attempt=1, outcome="gave up"), recovery(attempt=2, cause="later")])
    assert (standing.state, standing.note, standing.command) == ("given up", "rank 1 died", ("incidents", "r"))


def test_old_failure_is_not_shown() -> None:
    """A failure is current until a later attempt commits a checkpoint or the run is finished."""
    failed = [recovery(attempt=2, replaced_attempt=1)]
    begun = (claim(), checkpoint(10, "steps"), claim(2))
    assert current_failure(rows(*begun), failed) == "rank 1 died"
    assert current_failure(rows(*begun, checkpoint(20, "steps", 2)), failed) is None
    assert current_failure(rows(*begun, FinishRow()), failed) is None
    gave_up = [*failed, recovery(attempt=2, outcome="gave up", cause="rank 0 hangs", failed_at=datetime.now(UTC))]
    assert current_failure(rows(*begun, checkpoint(20, "steps", 2)), gave_up) == "rank 0 hangs"
    assert current_failure(rows(*begun, claim(3), checkpoint(20, "steps", 3)), gave_up) is None
    assert current_failure(rows(*begun), []) is None


def test_operator_time_is_no_recovery() -> None:
    """231 of the 240 s between the death and the first step were the operator's. Detection by a supervisor is recovery."""
    mine = describe_incident(recovery(noticed_by=OPERATOR, detect_s=231.0, total_s=240.0))
    assert mine["down"] == "3 min 51 s until an operator started it again"
    assert (mine["recovery"] or "").startswith("9 s: ")
    assert "detect" not in (mine["recovery"] or "")
    own = describe_incident(recovery())
    assert own["down"] is None
    assert (own["recovery"], own["lost"]) == (
        "4 s: detect 0.4 s, stop 0.1 s, claim 0.2 s, verify 0.3 s, load 2 s, first step 1 s",
        "1 row replayed, 0 s of training",
    )
