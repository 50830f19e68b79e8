"""A launcher under an orchestrator: events as lines of JSON on standard output, and an end when another launch takes over."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from catalog.connect import connect
from catalog.errors import DlacError, Fenced
from catalog.ledger import Ledger
from dlac_pipeline.launchers.orchestrator import MARGIN_S, Orchestrator, say
from dlac_pipeline.launchers.protocol import Launcher, launcher_for
from dlac_pipeline.ranks.rank import on_ending_signals
from dlac_pipeline.ranks.starter import RankStarter
from dlac_pipeline.recover.coordinator import launcher_of
from dlac_pipeline.request import Request


def serve(request: Request, starter: RankStarter, orchestrator: Orchestrator) -> int:
    """Serve a request of the orchestrator; returns the exit status."""
    try:
        launcher = launcher_for(request, say, starter)
    except DlacError as err:
        return say_error(err)
    on_ending_signals(launcher.stop)
    orchestrator.on_end(launcher.stop, grace_s=request.spec.launch.grace_s)
    if request.launched_by:
        threading.Thread(target=stop_when_replaced, args=(launcher, request), daemon=True).start()
    return run_and_tell(launcher)


def run_and_tell(launcher: Launcher) -> int:
    """Run it to its end and say how that came; returns the exit status."""
    try:
        outcome = launcher.run()
    except DlacError as err:
        return say_error(err)
    say({"event": "ended", "ending": outcome.ending, "attempts": outcome.attempts, "step": outcome.step})
    return 0


def say_error(err: DlacError) -> int:
    """Say what ended the run; returns the exit status."""
    say({"event": "error", "kind": type(err).__name__, "message": str(err)})
    return err.exit_code


def stop_when_replaced(launcher: Launcher, request: Request) -> None:
    """Leave once another launch has claimed the run: what is trained from then on can never be committed."""
    seen = 0
    while True:
        time.sleep(request.fence_look_s)
        with suppress(DlacError):  # a catalog that is away fences nobody
            ledger = Ledger(connect(request.spec.lakehouse))
            attempt = ledger.state(request.spec.run).fence.attempt
            if attempt == seen:
                continue
            rows = ledger.rows(request.spec.run, kinds=("claim",))
            seen = attempt
            owners = [launcher_of(rows, row["attempt"]) for row in rows]
            if request.launched_by in owners and owners[-1] != request.launched_by:
                break
    launcher.stop()
    # Nobody may read what is said here (the orchestrator may be stopped), and the supervisor may wait for just that.
    time.sleep(request.spec.launch.grace_s + MARGIN_S)
    os._exit(Fenced.exit_code)
