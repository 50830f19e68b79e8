"""The process on each node of a cluster job, which supervises the node's ranks.

It is `python -m dlac_pipeline.extensions.clusters.node_process`. The request is in the environment. Standard output has one event
per line of JSON, and standard error all else. SIGTERM makes the node exit after a checkpoint. Exit status: 0 if the run is
finished, UNFINISHED_EXIT_CODE if not, or the error's.
"""

import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.extensions.clusters.orchestrator import keep_events_apart, report
from dlac_pipeline.extensions.clusters.packed_request import unpack
from dlac_pipeline.extensions.clusters.scheduler import FIRST_NODE_VARIABLE, KEY_FILE_VARIABLE, UNFINISHED_EXIT_CODE
from dlac_pipeline.extensions.clusters.serve import report_error, run_and_report
from dlac_pipeline.extensions.clusters.settings import ClusterSpec
from dlac_pipeline.extensions.clusters.slurm import Slurm
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.launchers.protocol import Here
from dlac_pipeline.launchers.signals import on_ending_signals
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.claims import to_replace

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Ports of rendezvous, below those that the kernel gives to connections."""
_JOB_VARIABLE = "SLURM_JOB_ID"
_RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
"""Slurm: number of times that the job was queued again. Absent the first time."""


def for_node(request: Request, environment: Mapping[str, str]) -> Request:
    """Return the request with address and key of the rendezvous. Where nodes have accelerators, each has as many ranks."""
    launch, cluster = request.spec.launch, request.spec.section(ClusterSpec)
    meets = f"{environment.get(FIRST_NODE_VARIABLE, 'localhost')}:{_port_of(environment)}"
    ranks = launch.nproc_per_node or (cluster.gpu if launch.nodes else 0)
    key_file = launch.rendezvous_key_file or environment.get(KEY_FILE_VARIABLE, "")
    here = {"rendezvous": meets, "rendezvous_key_file": key_file, "nproc_per_node": ranks}
    launch = launch.model_copy(update=here)
    return request.model_copy(update={"spec": request.spec.model_copy(update={"launch": launch})})


def _port_of(environment: Mapping[str, str]) -> int:
    """Return the port of a job's rendezvous, by the key that all its nodes have. Jobs that share a node have others."""
    file = Path(environment.get(KEY_FILE_VARIABLE, ""))
    key = file.read_bytes() if file.is_file() else environment.get(KEY_VARIABLE, "").encode()
    return _FIRST_PORT + zlib.crc32(key) % _PORTS


def this_start(environment: Mapping[str, str]) -> str:
    """Return a name of this start of the job: the same on all nodes of Slurm, which share a log, or else this process's own."""
    return environment.get(_RESTARTS_VARIABLE, "0") if _JOB_VARIABLE in environment else str(time.time_ns())


def end_orphan(job: str, *, finished: bool) -> None:
    """End this node's job of Slurm if its first node is lost, with its batch script. Requeue it unless it is finished."""
    slurm = Slurm()
    # A container has no commands of Slurm. `dlac train` does the same.
    with suppress(OSError, subprocess.SubprocessError):
        state = slurm.state(job)
        if state is not None and state.first_node_lost:
            (slurm.cancel if finished else slurm.requeue)(job)


def main() -> int:
    """Supervise this node's ranks. Return the exit status."""
    keep_events_apart()
    report({"event": "node", "host": socket.gethostname(), "start": this_start(os.environ)})
    try:
        request = unpack(os.environ)
    except SpecInvalid as err:
        return report_error(err)
    request = for_node(request, os.environ)
    if request.replaces is not None and request.launched_by:  # of a job that is started again: its own last attempt
        with suppress(DlacError):  # the supervisor waits for a catalog that is unavailable
            claims = Ledger(connect(request.spec.lakehouse)).rows(request.spec.run, kinds=(ClaimRow,))
            attempt = to_replace(claims, request.replaces, launched_by=request.launched_by)
            request = request.model_copy(update={"replaces": attempt})
    supervisor = Here(request, on_event=report)
    on_ending_signals(supervisor.leave)
    code = run_and_report(supervisor, request, stopped=UNFINISHED_EXIT_CODE)
    if job := os.environ.get(_JOB_VARIABLE):
        end_orphan(job, finished=code == 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
