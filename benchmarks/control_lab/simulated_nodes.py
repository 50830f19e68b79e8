"""Many nodes: the store of a rendezvous, and any number of nodes, each a process forked from this one.

In: a job spec. Out: the nodes' messages. Nodes of a cluster start on their own processors, but these nodes take turns. So each
node reads the run's secret from a pipe, which is written when all nodes wait for it. They then meet at the same time.
"""

import gc
import json
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.control_lab.node import run_node
from benchmarks.control_lab.stub_starter import finished_step
from dlac_pipeline.elastic.preload import end_with_parent
from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.extensions.torchrun.commands import serve_rendezvous
from dlac_pipeline.spec.job_spec import JobSpec

Message = dict[str, Any]
_ANSWER_S = 60.0
_START_S = 300.0
_LOOK_S = 0.1
_STEP = 1_000_000
"""A step after every checkpoint."""


class SimulatedNodes:
    """The nodes by number, without those that were killed."""

    def __init__(self, spec: JobSpec, home: Path, *, nodes: int) -> None:
        """Fork all of them."""
        self.alive: list[int] = []
        self._home = home
        self._pending, self._tells = os.pipe()
        self._rest = b""
        self._keys = Path(tempfile.mkdtemp(prefix="keys-", dir=home))
        self._pids: dict[int, int] = {}
        self._asks: dict[int, int] = {}
        self.server_pid = _fork_server(spec.launch.rendezvous)
        record = finished_step(_STEP)
        gc.collect()
        gc.freeze()  # a collection in a child would copy all memory that it visits
        for number in range(nodes):
            self._start(number, spec, record)
        self.opened_at = self._open_gate(os.environ[KEY_VARIABLE].encode())

    def _start(self, number: int, spec: JobSpec, record: bytes) -> None:
        local = str(self._home / "local" / f"node-{number:03d}")
        checkpoint = spec.checkpoint.model_copy(update={"local": local})
        key = self._keys / str(number)
        os.mkfifo(key)
        launch = spec.launch.model_copy(update={"rendezvous_key_file": str(key)})
        mine = spec.model_copy(update={"checkpoint": checkpoint, "launch": launch})
        asked, asks = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(self._pending)
            for each in (*self._asks.values(), asks):
                os.close(each)
            run_node(number, mine, record, asked, self._tells, self._home / f"node-{number:03d}.log")
        os.close(asked)
        self._pids[number], self._asks[number] = pid, asks
        self.alive.append(number)

    def _open_gate(self, secret: bytes) -> float:
        """Give all nodes the secret once all of them wait for it, and return the time."""
        readers: dict[int, int] = {}
        deadline = time.monotonic() + _START_S
        while len(readers) < len(self.alive):
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {len(self.alive)} nodes at the gate, found {len(readers)}")
            for number in set(self.alive) - set(readers):
                with suppress(OSError):  # its reader has not opened it yet
                    readers[number] = os.open(self._keys / str(number), os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(_LOOK_S)
        for descriptor in readers.values():
            os.write(descriptor, secret)
            os.close(descriptor)
        return time.time()

    def messages(self, within_s: float) -> Iterator[Message]:
        """Yield the nodes' messages, until none has arrived for `within_s`."""
        while select.select([self._pending], [], [], within_s)[0]:
            *lines, self._rest = (self._rest + os.read(self._pending, 2**16)).split(b"\n")
            yield from map(json.loads, lines)

    def until(self, done: Callable[[Message], bool], *, within_s: float, what: str) -> list[Message]:
        """Return the nodes' messages up to the one that meets the condition.

        Raises:
            TimeoutError: no message meets it.
        """
        deadline, found = time.monotonic() + within_s, []
        while time.monotonic() < deadline:
            for message in self.messages(0.2):
                found.append(message)
                if done(message):
                    return found
        last = "\n".join(json.dumps(each) for each in found[-5:])
        raise TimeoutError(f"expected {what} within {within_s:.0f} s, found {len(found)} messages, at last:\n{last}")

    def listen(self, seconds: float) -> list[Message]:
        """Return the nodes' messages of `seconds` seconds."""
        deadline = time.monotonic() + seconds
        found: list[Message] = []
        while (left_s := deadline - time.monotonic()) > 0:
            found += self.messages(left_s)
        return found

    def counts(self) -> dict[int, Message]:
        """Return each node's resource use so far."""
        for number in self.alive:
            os.write(self._asks[number], b"?")
        found: dict[int, Message] = {}

        def done(message: Message) -> bool:
            if message["event"] == "counts":
                found[message["node"]] = message
            return len(found) == len(self.alive)

        self.until(done, within_s=_ANSWER_S, what="the counts of all nodes")
        return found

    def kill(self, numbers: Collection[int]) -> float:
        """SIGKILL nodes with all their processes, as a loss of power does, and return the time."""
        doomed = [each for number in numbers for each in _with_children(self._pids[number])]
        at = time.time()
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forget(numbers)
        return at

    def close(self) -> None:
        """End the remaining processes."""
        self.kill([*self.alive])
        os.kill(self.server_pid, signal.SIGKILL)
        os.waitpid(self.server_pid, 0)
        os.close(self._pending)
        os.close(self._tells)

    def _forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            os.waitpid(self._pids.pop(number), 0)
            os.close(self._asks.pop(number))
            self.alive.remove(number)

    @property
    def memory_bytes(self) -> int:
        """Memory that the supervisors share with no other process."""
        return sum(psutil.Process(pid).memory_full_info().uss for pid in self._pids.values())


@contextmanager
def run_nodes(spec: JobSpec, home: Path, *, nodes: int) -> Iterator[SimulatedNodes]:
    """Run simulated nodes."""
    simulated = SimulatedNodes(spec, home, nodes=nodes)
    try:
        yield simulated
    finally:
        simulated.close()


def _with_children(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    return []


def _fork_server(address: str) -> int:
    """Serve the rendezvous in a separate process, which does not depend on any node."""
    ready, ready_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            end_with_parent(signal.SIGKILL)
            serve_rendezvous(address, threading.Event(), lambda: os.close(ready_end))
        finally:
            os._exit(1)
    os.close(ready_end)
    os.read(ready, 1)  # returns once the child has closed its side
    os.close(ready)
    return pid
