"""The state of a run's last launch, and its status in a terminal."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.cli.shared import command_with
from dlac_pipeline.extensions.look.commands import describe_incident
from dlac_pipeline.extensions.look.display import describe_live, describe_status
from dlac_pipeline.extensions.look.run_state import current_failure, standing_of
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, FinishRow, LedgerRow
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from tests.small_records import small_recovery

pytestmark = pytest.mark.usefixtures("only_this_process")
LONG_AGO = datetime.now(UTC) - timedelta(hours=3)


def rows(*appended: LedgerRow, run: str = "r") -> list[LedgerRow]:
    """Return rows of a run, in order of `seq`."""
    return [
        replace(
            row, run=run, nonce="n", committed_at=max(row.committed_at, LONG_AGO), attempt=row.attempt or 1, seq=seq
        )
        for seq, row in enumerate(appended, start=1)
    ]


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
    """A launch that ended in order is not dead. A node without recent rows is silent."""
    assert standing_of(rows(*appended)).state == state


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


PLACE: dict[str, Any] = {
    "run": "r",
    "step": 1234,
    "total_steps": 20_000,
    "loss": 0.123456789,
    "attempt": 3,
    "launch_note": "",
    "attempts_without_progress": 2,
    "next_command": "dlac recover r",
}
"""Facts of a status and of a look at a training run."""


def test_status_has_main_facts() -> None:
    """The status has share, age, interval and the next command with the lakehouse's place."""
    lost = {"startup_s": 0.0, "down_s": 200.0, "replayed_s": 50.0, "checkpointing_s": 10.0, "abandoned_s": 10.0}
    goodput = {"ettr": 0.9, "ettr_at_most": 0.925, "wall_s": 4600.0, "idle_s": 1000.0, "unknown_s": 90.0, **lost}
    head = {"head_checkpoint": "c", "head_age_s": 600.0, "checkpoint_reason": "auto", "checkpoints": 1}
    interval = {"checkpoint_interval_s": 31.25, "checkpoint_interval_why": "what a checkpoint costs"}
    run = {"recoveries": 2, "launch": "dead", "excluded_by_rewinds": ["doc_id < 900", "lang = 'xx'"]}
    facts = {**PLACE, **head, **interval, **run, "goodput": goodput}
    shown = describe_status(facts, ("--home", "/lake"))
    assert shown["step"] == "1,234 of 20,000 (6%)"
    assert shown["checkpoint"] == "c, 10 min ago (auto)"
    assert (shown["kept"], shown["no progress"]) == ("1 checkpoint", "2 attempts since the last checkpoint")
    assert shown["goodput"] == "90.0% to 92.5% of 1 h; down 3 min 20 s, unknown 1 min 30 s, replayed 50 s"
    assert shown["next"] == "dlac recover r --home /lake"
    nothing = dict.fromkeys(("head_checkpoint", "checkpoint_interval_s", "goodput", "checkpoint_reason"))
    assert describe_status({**facts, **nothing})["checkpoint"] == "none committed yet"


def test_look_at_training_has_rates() -> None:
    """Rates have units. What is unknown is left out, and a run that trains has no next command."""
    unknown = dict.fromkeys(("tokens_per_s", "consumed_share", "eta_s", "last_sign_s", "problem"))
    rates = {"steps_per_s": 0.42, "samples_per_s": 13.44, "checkpoint_age_s": 7500.0}
    facts = {
        **PLACE,
        **unknown,
        **rates,
        "state": "computing",
        "launch": "training",
        "at_risk_steps": 1,
        "at_risk_s": 2.0,
    }
    shown = describe_live(facts)
    assert (shown["speed"], shown["checkpoint"]) == ("0.42 steps/s, 13 samples/s", "2 h 5 min ago")
    assert (shown["at risk"], shown["next"]) == ("1 step, 2 s of training", None)
    waits = describe_live({"run": "r", "state": "waiting", "waits_for": "a run named 'r'"})
    assert waits["found"] == "a run named 'r'"
