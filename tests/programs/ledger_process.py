"""A process at a ledger, without training: `ledger_process.py ROLE JSON`. It prints its results as JSON lines.

`commit`: claims a run and commits checkpoints. `first`: the same, in one empty lakehouse after another, all processes at once.
`upkeep`: upkeep without a pause, until a file named stop exists. `delayed`: a commit that stops itself (SIGSTOP) when it
has been prepared, before it is sent.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import CommitTableResponse

from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint, finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, LedgerRow


def lakehouse_at(home: str) -> Lakehouse:
    """Return the lakehouse of a home, in the catalog that $CATALOG names, or in an SQLite file."""
    return connect(LakehouseConfig(uri=os.environ.get("CATALOG", "")).at_home(Path(home)))


def report(**facts: Any) -> None:
    """Print one line for the parent process."""
    print(json.dumps(facts), flush=True)


def commit(home: str, run: str, commits: int, finishes: bool = False) -> None:
    """Claim the run, and commit `commits` checkpoints of two advances each."""
    ledger = Ledger(lakehouse_at(home))
    number = claim(ledger, run, nonce=run, replaces=0).fence.attempt
    attempt = Attempt(run=run, number=number, nonce=run)
    parent = None
    for step in range(1, commits + 1):
        parent = checkpoint(ledger, attempt, step, parent)
        report(committed=parent)
    if finishes:
        finish(ledger, attempt, step=commits)
    report(run=run, table=ledger.table_uuid)


def checkpoint(ledger: Ledger, attempt: Attempt, step: int, parent: str | None) -> str:
    """Commit one checkpoint, and return its id."""
    name = f"{attempt.run}-{step}-{attempt.nonce}"
    rows: list[LedgerRow] = [
        CheckpointRow(checkpoint_id=name, parent=parent, step=step),
        *(AdvanceRow(checkpoint_id=name, key_group=group) for group in range(2)),
    ]
    commit_checkpoint(ledger, attempt, checkpoint_id=name, parent=parent, rows=rows)
    return name


def first(home: str, run: str, times: int, processes: int) -> None:
    """Wait for all processes at each empty lakehouse, then make its tables and commit to them."""
    for each in range(times):
        place = Path(home) / f"{each}"
        (place / f"ready-{run}").touch()
        deadline = time.monotonic() + 120
        while len(list(place.glob("ready-*"))) < processes and time.monotonic() < deadline:
            time.sleep(0.001)
        commit(str(place / "home"), run, 1)


def repeat_upkeep(home: str, stop: str) -> None:
    """Run upkeep repeatedly."""
    while not Path(stop).exists():
        done = run_upkeep(lakehouse_at(home), keep=2)
        report(merged=sum(each.merged_files for each in done), removed=sum(each.removed_files for each in done))


def commit_late(home: str, run: str, nonce: str) -> None:
    """Commit the second checkpoint of attempt 1, and stop before it is sent."""
    ledger = Ledger(lakehouse_at(home))
    attempt = Attempt(run=run, number=1, nonce=nonce)
    real = SqlCatalog.commit_table

    def commit_table(self: SqlCatalog, *request: Any) -> CommitTableResponse:
        setattr(SqlCatalog, "commit_table", real)  # noqa: B010  # only once
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(self, *request)

    setattr(SqlCatalog, "commit_table", commit_table)  # noqa: B010  # a program, not a library
    report(committed=checkpoint(ledger, attempt, 2, f"{run}-1-{nonce}"))


ROLES: dict[str, Callable[..., None]] = {
    "commit": commit,
    "first": first,
    "upkeep": repeat_upkeep,
    "delayed": commit_late,
}

if __name__ == "__main__":
    try:
        ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
    except DlacError as err:
        report(error=type(err).__name__, message=str(err))
        sys.exit(err.exit_code)
