"""What every node of a cluster's job runs: `python -m dlac_pipeline.launchers.node`, with the request in its environment.

It finds out at which node all of them meet, and supervises its ranks. Standard output: one event per line of JSON; what libraries
and users' code print goes to standard error. SIGTERM, which is how schedulers preempt, evict and cancel, has it leave behind a
checkpoint; the run goes on if there are enough other nodes.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress

from pydantic import ValidationError

from catalog.connect import connect
from catalog.errors import DlacError, SpecInvalid
from catalog.ledger import Ledger
from dlac_pipeline.launchers.orchestrator import keep_events_apart, say
from dlac_pipeline.launchers.protocol import supervisor_of
from dlac_pipeline.launchers.serving import run_and_tell, say_error, stop_when_replaced
from dlac_pipeline.launchers.signals import on_ending_signals
from dlac_pipeline.recover.claims import to_replace
from dlac_pipeline.request import Request

REQUEST_VARIABLE = "DLAC_REQUEST"
"""Carries the request to the nodes."""
_HOSTS_VARIABLE = "VC_NODE_0_HOSTS"
"""Volcano: the name of the first pod."""
_NODES_VARIABLE = "SLURM_JOB_NODELIST"
"""Slurm: all nodes of the job, in its own short form."""

_RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
"""Slurm: how often the job was queued again; absent the first time."""


def packed(request: Request) -> str:
    """A request as one word without commas, quotes or dollars: schedulers hand on nothing else unchanged."""
    return base64.urlsafe_b64encode(zlib.compress(request.model_dump_json().encode())).decode()


def unpacked(environment: Mapping[str, str]) -> Request:
    """The request that a node's environment carries.

    Raises:
        SpecInvalid: there is none, or it is none of this version's.
    """
    try:
        return Request.model_validate_json(zlib.decompress(base64.urlsafe_b64decode(environment[REQUEST_VARIABLE])))
    except (KeyError, ValueError, zlib.error, ValidationError) as err:
        raise SpecInvalid(
            f"expected a request of this DLAC in ${REQUEST_VARIABLE}, found none: submit the job with the version that "
            f"its image has ({err})"
        ) from err


def meeting_host(environment: Mapping[str, str]) -> str:
    """The name of the node at which all meet: the job's first."""
    hosts = environment.get(_HOSTS_VARIABLE) or environment.get(_NODES_VARIABLE) or "localhost"
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None, "it matches anything"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def of_this_start(request: Request) -> Request:
    """The request, when a scheduler starts its job again: then its own last attempt is the one to replace."""
    if request.replaces is None or not request.launched_by:
        return request
    claims = Ledger(connect(request.spec.lakehouse)).rows(request.spec.run, kinds=("claim",))
    attempt = to_replace(claims, request.replaces, launched_by=request.launched_by)
    return request.model_copy(update={"replaces": attempt})


def this_start(environment: Mapping[str, str]) -> str:
    """What the nodes of one start of the job have in common, where they share a log; else of this process."""
    return environment.get(_RESTARTS_VARIABLE, "0") if _NODES_VARIABLE in environment else str(time.time_ns())


def main() -> int:
    """Supervise this node's ranks; returns the exit status."""
    keep_events_apart()
    say({"event": "node", "host": socket.gethostname(), "start": this_start(os.environ)})
    try:
        request = unpacked(os.environ)
    except SpecInvalid as err:
        return say_error(err)
    meets = f"{meeting_host(os.environ)}:{request.spec.cluster.port}"
    launch = request.spec.launch.model_copy(update={"rendezvous": meets})
    request = request.model_copy(update={"spec": request.spec.model_copy(update={"launch": launch})})
    with suppress(DlacError):  # a catalog that is away is waited for below
        request = of_this_start(request)
    supervisor = supervisor_of(request, say)
    on_ending_signals(supervisor.leave)
    if request.launched_by:
        threading.Thread(target=stop_when_replaced, args=(supervisor, request), daemon=True).start()
    return run_and_tell(supervisor)


if __name__ == "__main__":
    sys.exit(main())
