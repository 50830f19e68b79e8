"""Who starts a run that another machine trains is refused, as far as signs of life of that one can be seen from here.

A courtesy as the lock is, for what no lock of this machine's can know; safety does not rest on it. A launch of a cluster's job is
never refused, for its scheduler may start it again; nor is one of an orchestrator's runs for the sake of another of its runs,
which only the orchestrator can tell to be alive.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable

from catalog.errors import RunBusy
from catalog.run_rows import Row, fence_of_rows, finished_of_rows
from dlac_pipeline.launch_spec import NODES
from dlac_pipeline.recover.claims import claimed_by, idle, rendezvous_of
from dlac_pipeline.recover.incident import last_reason, left_in_order
from dlac_pipeline.recover.patience import LOST_AFTER_S
from dlac_pipeline.recover.signs import Signs, signs_of
from dlac_pipeline.spec import JobSpec

_LOOK_S = 1.0


def refuse_if_alive_elsewhere(
    rows_now: Callable[[], list[Row]], spec: JobSpec, *, launched_by: str, wait_s: float, stop: threading.Event
) -> None:
    """Wait `wait_s` for a launch of the spec's run elsewhere to leave or to be lost, then refuse; `rows_now` reads its rows.

    Raises:
        RunBusy: it is to be taken for alive, or `stop` was set.
    """
    deadline = time.monotonic() + wait_s
    while True:
        rows = rows_now()
        signs = signs_of(rows, fence_of_rows(rows).attempt)
        if not (_counts(rows, spec, signs, launched_by) and signs.alive(lost_after_s=LOST_AFTER_S)):
            return
        if time.monotonic() >= deadline or stop.wait(_LOOK_S):
            raise RunBusy(_message(spec.run, fence_of_rows(rows).attempt, signs))


def _counts(rows: list[Row], spec: JobSpec, signs: Signs, launched_by: str) -> bool:
    """Whether the current attempt may train elsewhere, and only its signs of life can tell."""
    attempt = fence_of_rows(rows).attempt
    if not attempt or finished_of_rows(rows) or idle(rows, attempt):
        return False
    if left_in_order(rows, attempt) and last_reason(rows, attempt) != NODES:  # which goes on with more machines
        return False
    if (signs.host, signs.local) == (socket.gethostname(), spec.checkpoint.local):
        return False  # the lock tells, and better
    one_job = spec.launch.on != "here" or bool(launched_by and claimed_by(rows, attempt))
    same_place = bool(spec.launch.rendezvous) and rendezvous_of(rows, attempt) == spec.launch.rendezvous
    return not (one_job or same_place)


def _message(run: str, attempt: int, signs: Signs) -> str:
    silent_s = max(0.0, signs.silent_s)
    found, wait = (
        (f"on this machine, with the local folder {signs.local!r}", "wait for it")
        if signs.here
        else (
            f"on machine {signs.host!r}, whose last sign of life was {silent_s:.0f} s ago",
            f"wait {math.ceil(LOST_AFTER_S - signs.silent_s)} s, for it counts as lost if no other follows",
        )
    )
    return (
        f"expected no other launch of run {run!r}, found attempt {attempt} {found}: {wait}, stop it, or take the run over with "
        "--takeover, which fences it off"
    )
