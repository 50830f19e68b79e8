"""One of many nodes: a process with a real supervisor, forked from one that has imported all libraries.

A `TCPStore` in the client counts its store operations. Bytes and messages are the kernel's counts of the connections to the
store (TCP_INFO). Processor time is that of getrusage, for the supervisor and its ended processes.
"""

import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from benchmarks.control_lab.stub_starter import StubStarter
from dlac_pipeline.elastic import endpoint, rank_assignment
from dlac_pipeline.elastic.preload import end_with_parent
from dlac_pipeline.elastic.rank_assignment import LastCall
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_PIPE_BUF = 4096
"""Bytes that one write puts into a pipe at once, even with other writers."""
_TOLD = (
    "attempt",
    "step",
    "cause",
    "leader",
    "pids",
    "outcome",
    "total_s",
    "detect_s",
    "claim_s",
    "verify_s",
    "message",
)
_BYTES = struct.Struct("@QQ")
_SEGMENTS = struct.Struct("@II")
_BYTES_AT, _SEGMENTS_AT, _INFO_BYTES = 120, 152, 192
"""Offsets in tcp_info of the bytes sent and received, and of the data segments received and sent."""


class CountedStore(TCPStore):
    """PyTorch's store, which counts the operations of this process."""

    operations = 0

    def set(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and do it, as the methods below."""
        return self._count_call(super().set, *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # as above
        return self._count_call(super().get, *args, **kwargs)

    def add(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # as above
        return self._count_call(super().add, *args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # as above
        return self._count_call(super().check, *args, **kwargs)

    def compare_set(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # as above
        return self._count_call(super().compare_set, *args, **kwargs)

    def multi_get(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # as above
        return self._count_call(super().multi_get, *args, **kwargs)

    def multi_set(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # as above
        return self._count_call(super().multi_set, *args, **kwargs)  # type: ignore[misc]  # torch's declarations lack it

    def _count_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        CountedStore.operations += 1
        return call(*args, **kwargs)


class AllAtFirst(LastCall):
    """Wait of the leader for all nodes before the first round. A later round does not grow, because stubs commit nothing."""

    has_trained = False
    """True if this node has taken part in a round."""

    def is_over(self, ready: int, *, busy: bool) -> bool:
        """Return whether a round of the nodes that are ready is formed."""
        return (AllAtFirst.has_trained or ready >= self._launch.max_nodes) and super().is_over(ready, busy=busy)


def run_node(number: int, spec: JobSpec, record: bytes, asked: int, reports: int, log: Path) -> None:
    """Supervise until the end, in a forked child. Never return.

    `asked` is a pipe, each byte of which requests the counts. `reports` is the pipe for events and counts as JSON lines.
    """
    status = 1
    try:
        end_with_parent(signal.SIGKILL)
        _redirect(log)
        vars(endpoint)["TCPStore"] = CountedStore  # the client's side: the server is another process
        vars(rank_assignment)["LastCall"] = AllAtFirst
        port = int(spec.launch.rendezvous.rpartition(":")[2])

        def report(message: dict[str, Any]) -> None:
            line = json.dumps({"node": number, "at": time.time(), **message, **_counts(port)}).encode() + b"\n"
            assert len(line) <= _PIPE_BUF, "else lines of two nodes mix"
            os.write(reports, line)

        def on_event(event: dict[str, Any]) -> None:
            AllAtFirst.has_trained = AllAtFirst.has_trained or event["event"] == "attempt"
            if event["event"] != "verifying":
                told_of = {name: _short(event[name]) for name in _TOLD if name in event}
                report({"event": event["event"], **told_of})

        threading.Thread(target=_answer, args=(asked, report), name="meter", daemon=True).start()
        outcome = Supervisor(Request(spec=spec, takeover=True), on_event=on_event, starter=StubStarter(record)).run()
        report({"event": "ended", "outcome": outcome.ending})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _short(value: Any) -> Any:
    return value[:400] if isinstance(value, str) else value


def _answer(asked: int, report: Callable[[dict[str, Any]], None]) -> None:
    while os.read(asked, 1):
        report({"event": "counts"})


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _counts(port: int) -> dict[str, float]:
    """Return this node's resource use so far."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    sent_bytes = received_bytes = messages = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was closed since, or has no peer
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as each:
                if each.family == socket.AF_UNIX or each.getpeername()[1] != port:
                    continue
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            sent, received = _BYTES.unpack_from(info, _BYTES_AT)
            sent_bytes, received_bytes = sent_bytes + sent, received_bytes + received
            messages += sum(_SEGMENTS.unpack_from(info, _SEGMENTS_AT))
    return {
        "cpu_s": own.ru_utime + own.ru_stime,
        "children_cpu_s": ended.ru_utime + ended.ru_stime,
        "operations": CountedStore.operations,
        "sent_bytes": sent_bytes,
        "received_bytes": received_bytes,
        "messages": messages,
    }
