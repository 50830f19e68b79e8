"""train_tiny, whose coordinator kills or stops itself around a commit of the run's first attempt, or of $SABOTAGED_ATTEMPT.

$SABOTAGE is ACTION@STEP: kill-before-commit, kill-after-commit, sleep-before-commit or stop-before-commit (between reading
the fence and committing) at the checkpoint of that step, or kill-after-finish after the end of the run at that step.
"""

import os
import signal
import time
from typing import Any

import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline.lakehouse.ledger.commits
from dlac_pipeline.checkpoint.commit import coordinator
from dlac_pipeline.lakehouse.ledger.commits import Attempt
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState
from dlac_pipeline.train import open_attempt

_commit = dlac_pipeline.lakehouse.ledger.commits.commit_checkpoint
_finish = dlac_pipeline.lakehouse.ledger.commits.finish
_check_mine = dlac_pipeline.lakehouse.ledger.commits.check_mine
_armed = False


def sabotaged_commit(ledger: Ledger, attempt: Attempt, *, checkpoint_id: str, **rest: Any) -> RunState:
    """Commit, with the requested sabotage."""
    global _armed  # noqa: PLW0603 - a program, not a library
    sabotage, step = os.environ["SABOTAGE"].split("@")
    due = attempt.number == int(os.environ.get("SABOTAGED_ATTEMPT", "1")) and f"-{int(step):09d}-" in checkpoint_id
    if due and sabotage == "kill-before-commit":
        os.kill(os.getpid(), signal.SIGKILL)
    if due and sabotage == "sleep-before-commit":
        time.sleep(2)
    _armed = due and sabotage == "stop-before-commit"
    state = _commit(ledger, attempt, checkpoint_id=checkpoint_id, **rest)
    if due and sabotage == "kill-after-commit":
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
    if os.environ["SABOTAGE"] == f"kill-after-finish@{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    return state


if __name__ == "__main__":
    open_attempt.finish = sabotaged_finish  # type: ignore[attr-defined]  # replaced in the calling module
    coordinator.commit_checkpoint = sabotaged_commit  # type: ignore[attr-defined]  # replaced in the calling module
    dlac_pipeline.lakehouse.ledger.commits.check_mine = sabotaged_check
    train_tiny.main()
