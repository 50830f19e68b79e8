"""train_tiny, whose first attempt sleeps before its commits: $COMMIT_SLEEPS_S in order, the last one for all later commits.

With $EXPECTED_S rank 0 expects every checkpoint to take so long.
"""

import os
import time
from typing import Any

import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

from dlac_pipeline.checkpoint.commit import coordinator
from dlac_pipeline.checkpoint.interval import Interval
from dlac_pipeline.lakehouse.ledger.commits import Attempt, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState

_sleeps_s = [float(each) for each in os.environ.get("COMMIT_SLEEPS_S", "0").split(",")]


def slow_commit(ledger: Ledger, attempt: Attempt, **rest: Any) -> RunState:
    """Commit after a sleep."""
    if attempt.number == 1:
        time.sleep(_sleeps_s.pop(0) if len(_sleeps_s) > 1 else _sleeps_s[0])
    return commit_checkpoint(ledger, attempt, **rest)


if __name__ == "__main__":
    coordinator.commit_checkpoint = slow_commit  # type: ignore[attr-defined]  # replaced in the calling module
    if expected := os.environ.get("EXPECTED_S"):
        setattr(Interval, "needed_s", lambda *_, **__: float(expected))  # noqa: B010 - replaced in its class
    train_tiny.main()
