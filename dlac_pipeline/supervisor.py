"""The supervisor as a process of its own, for an orchestrator: `python -m dlac_pipeline.supervisor < request`.

Standard input: one line of JSON (the request), then nothing until the orchestrator closes it or dies, which ends the run in
good order. Standard output: one event per line of JSON, among them a sign of life (`alive`) every few seconds. Exit status: 0,
or that of the error (catalog/errors.py). A supervisor whose run was taken over by another launch leaves, and does not wait until
its next commit is refused.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from catalog.connect import connect
from catalog.errors import DlacError, Fenced, SpecInvalid, TrainingFailed
from catalog.ledger import Ledger
from dlac_pipeline.recover.coordinator import launcher_of
from dlac_pipeline.recover.leg_choice import Wish
from dlac_pipeline.recover.supervise import Supervisor
from dlac_pipeline.spec import JobSpec

_MARGIN_S = 5.0
"""What the supervisor gets on top of the ranks' grace period when its orchestrator is gone."""
ALIVE_EVERY_S = 5.0
"""Seconds between two signs of life."""
_SAYING = threading.Lock()


class Request(BaseModel):
    """What an orchestrator asks of the supervisor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: JobSpec
    """Resolved."""
    plan_ids: tuple[str, ...] = ()
    repin: bool = False
    replaces: int | None = None
    takeover: bool = False
    wait_s: float = 0.0
    noticed_by: str = "operator"
    noticed_at: float | None = None
    """When the failure was noticed, in seconds since the epoch; unset: when this supervisor was started."""
    launched_by: str = ""
    """The orchestrator's run; empty: nobody's, and a takeover is noticed at the next commit only."""
    fence_look_s: float = 10.0
    """Seconds between two looks whether another launch has taken the run over."""


def main() -> int:
    """Serve one request; returns the exit status."""
    try:
        request = Request.model_validate_json(sys.stdin.readline())
    except ValidationError as err:
        _say({"event": "error", "kind": SpecInvalid.__name__, "message": f"not a valid request: {err}"})
        return SpecInvalid.exit_code
    supervisor = Supervisor(
        request.spec,
        on_event=_say,
        wish=Wish(plan_ids=request.plan_ids, repin=request.repin),
        replaces=request.replaces,
        takeover=request.takeover,
        wait_s=request.wait_s,
        noticed_by=request.noticed_by,
        noticed_at=request.noticed_at,
        launched_by=request.launched_by,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    grace_s = request.spec.launch.grace_s
    threading.Thread(target=_stop_with_orchestrator, args=(supervisor, grace_s), daemon=True).start()
    threading.Thread(target=_say_alive, daemon=True).start()
    if request.launched_by:
        threading.Thread(target=_stop_when_replaced, args=(supervisor, request), daemon=True).start()
    try:
        outcome = supervisor.run()
    except DlacError as err:
        _say({"event": "error", "kind": type(err).__name__, "message": str(err)})
        return err.exit_code
    _say({"event": "ended", "ending": outcome.ending, "attempts": outcome.attempts, "step": outcome.step})
    return 0


def _stop_with_orchestrator(supervisor: Supervisor, grace_s: float) -> None:
    """Read standard input to its end: whoever held the other side is gone. Then leave, in good order or not."""
    while os.read(sys.stdin.fileno(), 4096):
        continue
    supervisor.stop()
    time.sleep(grace_s + _MARGIN_S)
    os._exit(
        TrainingFailed.exit_code
    )  # busy with something long, a verification perhaps; the ranks die with this process


def _stop_when_replaced(supervisor: Supervisor, request: Request) -> None:
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
    supervisor.stop()
    # Nobody may read what is said here (the orchestrator may be stopped), and the supervisor may wait for just that.
    time.sleep(request.spec.launch.grace_s + _MARGIN_S)
    os._exit(Fenced.exit_code)


def _say_alive() -> None:
    """Tell whoever listens that this process runs; that the ranks do, their progress tells."""
    while True:
        time.sleep(ALIVE_EVERY_S)
        _say({"event": "alive"})


def _say(event: dict[str, Any]) -> None:
    try:
        with _SAYING:
            print(json.dumps(event, default=str), flush=True)
    except BrokenPipeError:  # nobody listens any more; the end of standard input says so as well
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends


if __name__ == "__main__":
    sys.exit(main())
