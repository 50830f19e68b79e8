"""train_tiny, whose coordinator kills or stops itself around a commit of the run's first attempt, or of $SABOTAGED_ATTEMPT.

$SABOTAGE is ACTION@STEP: kill-before-commit, kill-after-commit or stop-before-commit (between reading the fence and
committing) at the checkpoint of that step, or kill-after-finish after the end of the run at that step. The
first attempt sleeps $COMMIT_SLEEPS_S seconds before its commits in order, the last number for all later commits. With
$EXPECTED_S rank 0 expects every checkpoint to take so long.
"""

import os
import signal
import time
from typing import Any

import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline.lakehouse.ledger.commits
from dlac_pipeline.checkpoint.commit import coordinator
from dlac_pipeline.checkpoint.interval import Interval
from dlac_pipeline.lakehouse.ledger.commits import Attempt
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState
from dlac_pipeline.train import open_attempt

_commit = dlac_pipeline.lakehouse.ledger.commits.commit_checkpoint
_finish = dlac_pipeline.lakehouse.ledger.commits.finish
_check_mine = dlac_pipeline.lakehouse.ledger.commits.check_mine
_armed = False
_action, _, _step = os.environ.get("SABOTAGE", "@-1").partition("@")
_sleeps_s = [float(each) for each in os.environ.get("COMMIT_SLEEPS_S", "0").split(",")]


def sabotaged_commit(ledger: Ledger, attempt: Attempt, *, checkpoint_id: str, **rest: Any) -> RunState:
    """Commit, with the requested sabotage."""
    global _armed  # noqa: PLW0603 - a program, not a library
    due = attempt.number == int(os.environ.get("SABOTAGED_ATTEMPT", "1")) and f"-{int(_step):09d}-" in checkpoint_id
    if attempt.number == 1:
        time.sleep(_sleeps_s.pop(0) if len(_sleeps_s) > 1 else _sleeps_s[0])
    if due and _action == "kill-before-commit":
        os.kill(os.getpid(), signal.SIGKILL)
    _armed = due and _action == "stop-before-commit"
    state = _commit(ledger, attempt, checkpoint_id=checkpoint_id, **rest)
    if due and _action == "kill-after-commit":
        os.kill(os.getpid(), signal.SIGKILL)
    return state


def sabotaged_check(state: RunState, attempt: Attempt) -> None:
    """Check the fence that was just read, then stop, once."""
    global _armed  # noqa: PLW0603 - a program, not a library
    _check_mine(state, attempt)
    if _armed:
        _armed = False
        os.kill(os.getpid(), signal.SIGSTOP)


def sabotaged_finish(ledger: Ledger, attempt: Attempt, *, step: int) -> RunState:
    """End the run, and then the coordinator."""
    state = _finish(ledger, attempt, step=step)
    if (_action, _step) == ("kill-after-finish", str(step)):
        os.kill(os.getpid(), signal.SIGKILL)
    return state


if __name__ == "__main__":
    open_attempt.finish = sabotaged_finish  # type: ignore[attr-defined]  # replaced in the calling module
    coordinator.commit_checkpoint = sabotaged_commit  # type: ignore[attr-defined]  # replaced in the calling module
    dlac_pipeline.lakehouse.ledger.commits.check_mine = sabotaged_check
    if expected := os.environ.get("EXPECTED_S"):
        setattr(Interval, "needed_s", lambda *_, **__: float(expected))  # noqa: B010 - replaced in its class
    train_tiny.main()
