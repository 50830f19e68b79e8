"""The state of a run's last launch, and its status in a terminal."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlac_pipeline.cli.display import describe_outcome
from dlac_pipeline.cli.shared import command_with, facts_table
from dlac_pipeline.extensions.look.commands import describe_incident
from dlac_pipeline.extensions.look.display import describe_live, describe_status
from dlac_pipeline.extensions.look.run_state import current_failure, standing_of
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, FinishRow, LedgerRow
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.supervisor import Outcome
from tests.small_records import small_recovery

pytestmark = pytest.mark.usefixtures("only_this_process")
LONG = "team-nlp.llama-continual-pretraining-2026-11-23-with-a-very-long-name-of-a-run"
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


def test_many_attempts_cost_few_passes() -> None:
    """The number of passes over the rows of a long run does not grow with its attempts."""

    class Counted(list[LedgerRow]):
        passes = 0

        def __iter__(self) -> Iterator[LedgerRow]:
            self.passes += 1
            return super().__iter__()

    few, many = (Counted(rows(*map(claim, range(1, count)))) for count in (3, 50))
    assert (standing_of(few).state, standing_of(many).state) == ("dead", "dead")
    assert many.passes == few.passes


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


def test_outcome_names_attempt() -> None:
    """The outcome has the run's attempt, and the number of attempts of this command if it is not one."""
    fifth = Outcome(ending="finished", attempts=1, step=1200)
    assert describe_outcome("r", fifth, attempt=5) == "run 'r' finished at step 1,200 in attempt 5"
    again = Outcome(ending="caught_up", attempts=3, step=19)
    assert (
        describe_outcome("r", again, attempt=5)
        == "run 'r' caught up at step 19 in attempt 5 (3 attempts by this command)"
    )
    assert (
        describe_outcome("r", Outcome(ending="stopped", attempts=0, step=0), attempt=0) == "run 'r' stopped at step 0"
    )


STATUS: dict[str, Any] = {
    "run": LONG,
    "state": "open",
    "step": 1234,
    "loss": 0.123456789,
    "head_checkpoint": f"{LONG}-000001234-a2809855",
    "head_age_s": 600.0,
    "checkpoint_reason": "auto",
    "checkpoint_interval_s": 31.25,
    "checkpoint_interval_why": "what a checkpoint costs, and 2 failures in the last hours",
    "checkpoints": 1,
    "attempt": 3,
    "attempts_without_progress": 2,
    "excluded_by_rewinds": ["doc_id < 900", "lang = 'xx'"],
    "recoveries": 2,
    "goodput": {
        "ettr": 0.9,
        "ettr_at_most": 0.925,
        "wall_s": 4600.0,
        "idle_s": 1000.0,
        "startup_s": 0.0,
        "down_s": 200.0,
        "replayed_s": 50.0,
        "checkpointing_s": 10.0,
        "abandoned_s": 10.0,
        "unknown_s": 90.0,
    },
    "total_steps": 20_000,
    "launch": "dead",
    "launch_note": "attempt 3 has no process on this node any more, last heartbeat 10 min ago",
    "next_command": "dlac recover r",
}
FRESH: dict[str, Any] = {
    **dict.fromkeys(STATUS),
    "run": "r",
    "step": 0,
    "checkpoints": 0,
    "attempt": 1,
    "attempts_without_progress": 1,
    "excluded_by_rewinds": [],
    "recoveries": 0,
    "launch": "training",
    "launch_note": "",
    "next_command": "",
}
LIVE: dict[str, Any] = {
    "run": LONG,
    "state": "computing",
    "step": 15,
    "total_steps": None,
    "loss": None,
    "steps_per_s": 0.42,
    "samples_per_s": 13.44,
    "tokens_per_s": None,
    "consumed_share": 0.5,
    "checkpoint_age_s": 7500.0,
    "at_risk_steps": 1,
    "at_risk_s": 2.0,
    "attempt": 1,
    "attempts_without_progress": 0,
    "eta_s": None,
    "last_sign_s": 0.1,
    "problem": None,
    "launch": "training",
    "launch_note": "attempt 1, process 4711 on this node",
    "next_command": "dlac status r --watch",
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_status_fits_terminal(width: int) -> None:
    """No line is wider than the terminal, with names of any length. No field is None, even without a checkpoint."""
    waiting = {"run": LONG, "state": "waiting", "waits_for": "expected a run named " + LONG}
    silent = {
        **LIVE,
        **{name: None for name in LIVE if name.endswith("_s") and name != "at_risk_s"},
        "at_risk_steps": 0,
    }
    described = [
        *(describe_status(each, ("--home", "/deep/" * 20)) for each in (STATUS, FRESH)),
        *(describe_live(each) for each in (LIVE, silent, waiting)),
        describe_incident(recovery(cause="KeyError: " + LONG * 3)),
    ]
    for facts in described:
        output = io.StringIO()
        Console(file=output, width=width).print(facts_table(facts))
        lines = output.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert not any("None" in line or "0/s" in line or "per |" in line for line in lines)


def test_status_has_main_facts() -> None:
    """The status has share, age, interval and the next command with the lakehouse's place. Rates have units."""
    shown = describe_status(STATUS, ("--home", "/lake"))
    assert shown["step"] == "1,234 of 20,000 (6%)"
    assert shown["checkpoint"] == f"{LONG}-000001234-a2809855, 10 min ago (auto)"
    assert (shown["kept"], shown["no progress"]) == ("1 checkpoint", "2 attempts since the last checkpoint")
    assert shown["goodput"] == "90.0% to 92.5% of 1 h; down 3 min 20 s, unknown 1 min 30 s, replayed 50 s"
    assert shown["next"] == "dlac recover r --home /lake"
    live = describe_live(LIVE)
    assert (live["speed"], live["checkpoint"]) == ("0.42 steps/s, 13 samples/s", "2 h 5 min ago")
    assert (live["at risk"], live["next"]) == ("1 step, 2 s of training", None)
