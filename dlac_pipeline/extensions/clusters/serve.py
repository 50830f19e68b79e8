"""A launcher under an orchestrator: events as lines of JSON on standard output, and an end when another launch takes over."""

import os
import threading
import time

from dlac_pipeline.extensions.clusters.orchestrator import MARGIN_S, report
from dlac_pipeline.lakehouse.errors import DlacError, Fenced, error_kind
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.launchers.bug_report import report_unexpected
from dlac_pipeline.launchers.protocol import Launcher
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.claims import launcher_of


def run_and_report(launcher: Launcher, request: Request, *, stopped: int = 0) -> int:
    """Run the launcher to its end and report it. Return the exit status, which is `stopped` if it was asked to exit."""
    if request.launched_by:
        threading.Thread(target=stop_when_replaced, args=(launcher, request), daemon=True).start()
    try:
        outcome = launcher.run()
    except DlacError as err:
        return report_error(err)
    except Exception as err:
        report({"event": "error", "kind": type(err).__name__, "message": report_unexpected(err)})
        return DlacError.exit_code
    report({"event": "ended", "ending": outcome.ending, "attempts": outcome.attempts, "step": outcome.step})
    return stopped if outcome.ending == "stopped" else 0


def report_error(err: DlacError) -> int:
    """Report the error that ended the run. Return the exit status."""
    report({"event": "error", "kind": error_kind(err), "message": str(err)})
    return err.exit_code


def stop_when_replaced(launcher: Launcher, request: Request) -> None:
    """Exit once the run was this launch's and is another's: later training can never be committed."""
    ledger: Ledger | None = None
    seen = 0
    while True:
        time.sleep(request.fence_look_s)
        try:
            ledger = ledger or Ledger(connect(request.spec.lakehouse))
            attempt = ledger.state(request.spec.run).fence.attempt
            rows = ledger.rows(request.spec.run, kinds=(ClaimRow,)) if attempt != seen else []
        except DlacError:
            if ledger is not None:
                ledger.lakehouse.catalog.close()
            ledger = None  # a new connection
            continue
        seen = attempt
        owners = [launcher_of(rows, row.attempt) for row in rows]
        if request.launched_by in owners and owners[-1] != request.launched_by:
            break
    launcher.stop()
    # The orchestrator may be stopped and read no output, and the supervisor may wait for that.
    time.sleep(request.spec.launch.orphaned_s + MARGIN_S)
    os._exit(Fenced.exit_code)
