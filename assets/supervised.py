"""A supervisor process under a Dagster run: events come in while it trains, and it never outlives the run.

The supervisor leads a session of its own. It ends in good order when its standard input closes, which happens however
this process dies; when Dagster interrupts this process, it is asked to stop, then killed with its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from dlac_pipeline.supervisor import Request

_MARGIN_S = 10.0
"""What the supervisor gets on top of the ranks' grace period."""


def supervised(request: Request) -> Iterator[dict[str, Any]]:
    """The events of the supervised run, as they happen; the last one is `ended` or `error`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dlac_pipeline.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request.model_dump_json() + "\n")
        process.stdin.flush()
        last: dict[str, Any] = {}
        for line in process.stdout:
            last = json.loads(line)
            yield last
        process.wait()
        if last.get("event") not in ("ended", "error"):
            yield {"event": "error", "kind": "SupervisorDied", "message": f"exit status {process.returncode}"}
    finally:
        _end(process, request.spec.launch.grace_s + _MARGIN_S)


def _end(process: subprocess.Popen[str], grace_s: float) -> None:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if stream is not None:
                stream.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
