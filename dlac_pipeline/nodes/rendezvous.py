"""How machines meet: torchrun's rendezvous, which says who takes part in a round and gives them a store to talk through.

In: a host:port. Out: round after round, this machine's place among those that are there. One of the machines serves the store.
The calls of a network that has gone silent may block without end, so none is made on the caller's thread.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousExitOp,
    create_handler,
)

from catalog.errors import NodesMissing, SpecInvalid
from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.nodes.talk import Round

Result = TypeVar("Result")
_LOOK_S = 0.1
_AGAIN_S = 1.0
_WANTED_S = 5.0
_ANSWER_S = 2.0
_KEEP_ALIVES = 3
logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.CRITICAL)
"""Else it warns each second of a store that is gone, which `Talk` has noticed."""
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
"""Else a machine that comes later waits for the address of a store that rank 0 gave in the first round only (torch 2.13)."""


class Rendezvous:
    """This machine's part in the rendezvous of a run."""

    def __init__(self, launch: LaunchSpec, run: str) -> None:
        self._launch = launch
        self._run = run
        self._host, _, port = launch.rendezvous.rpartition(":")
        self._port = int(port)
        self._handler: DynamicRendezvousHandler | None = None
        self._store: TCPStore | None = None
        self._serves = False

    @property
    def address(self) -> str:
        """At which the others reach this machine."""
        if _is_mine(self._host):
            return self._host
        family, kind, _, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(where)
            return str(probe.getsockname()[0])

    def join(self, stop: threading.Event, still_wanted: Callable[[], None]) -> Round | None:
        """Take part in the next round, behind the one that this machine is in; None: told to stop meanwhile.

        `still_wanted` is called every few seconds, and raises where there is nothing left to wait for.

        Raises:
            NodesMissing: too few machines came, or nobody served the rendezvous, for `launch.gather_timeout_s`.
        """
        deadline = time.monotonic() + self._launch.gather_timeout_s
        while not stop.is_set():
            left_s = deadline - time.monotonic()
            try:
                return self._join(stop, still_wanted, left_s)
            except (RendezvousError, RuntimeError, OSError, NotInTime) as err:
                if isinstance(err, RendezvousTimeoutError | NotInTime) and self._others_train():
                    deadline = time.monotonic() + self._launch.gather_timeout_s
                    continue
                self.forget()
                if time.monotonic() >= deadline - _AGAIN_S:
                    raise NodesMissing(
                        f"expected {self._launch.nodes} nodes at {self._launch.rendezvous!r} within "
                        f"{self._launch.gather_timeout_s:.0f} s, found too few, or nobody there: {err or type(err).__name__}; "
                        "start the same command on the others, the one with that address first"
                    ) from err
            still_wanted()
            stop.wait(_AGAIN_S)
        return None

    def _others_train(self) -> bool:
        """Whether there is a round that this machine is too many for: then it waits until somebody is missing."""
        handler = self._handler
        return handler is not None and bool(handler._state_holder.state.complete)

    def forget(self) -> None:
        """Meet through another connection the next time; whoever serves the store goes on serving it."""
        self._handler = None
        if not self._serves:
            self._store = None

    def leave(self) -> None:
        """Take no part any more, so that the others need not wait until this machine counts as lost."""
        if (handler := self._handler) is None:
            return
        self._handler = None

        def left() -> None:  # its shutdown() would close the rendezvous for all
            handler._stop_heartbeats()
            handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _AGAIN_S)

        with suppress(RendezvousError, RuntimeError, NotInTime):
            _in_time(left, 2 * _AGAIN_S)

    def _join(self, stop: threading.Event, still_wanted: Callable[[], None], left_s: float) -> Round | None:
        waiting = _Waiting(stop, still_wanted)
        if self._handler is None:
            self._handler = _in_time(lambda: self._met(left_s), left_s, waiting)
        handler = self._handler
        info = None if handler is None else _in_time(handler.next_rendezvous, left_s, waiting)
        if handler is None or info is None:
            return None
        return Round(index=info.rank, count=info.world_size, store=info.store, waiting=handler.num_nodes_waiting)

    def _met(self, left_s: float) -> DynamicRendezvousHandler:
        launch = self._launch
        if self._store is None:
            self._store = self._opened()
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=launch.rendezvous,
            run_id=self._run,
            min_nodes=launch.min_nodes,
            max_nodes=launch.max_nodes,
            local_addr=self.address,
            join_timeout=max(1, int(left_s)),
            last_call_timeout=launch.last_call_s,
            keep_alive_interval=max(1, launch.node_timeout_s // _KEEP_ALIVES),
            keep_alive_max_attempt=_KEEP_ALIVES,
        )
        return create_handler(self._store, C10dRendezvousBackend(self._store, self._run), parameters)

    def _opened(self) -> TCPStore:
        patience = timedelta(seconds=self._launch.node_timeout_s)
        self._serves = _serves_here(self._host, self._port)
        if not self._serves and not _answers(self._host, self._port):
            raise OSError(f"nobody answers at {self._launch.rendezvous!r}")
        return TCPStore(self._host, self._port, is_master=self._serves, wait_for_workers=False, timeout=patience)


def serve(address: str, stop: threading.Event, on_ready: Callable[[], None]) -> None:
    """Serve a rendezvous at host:port until told to stop, on a machine that outlives those that meet there.

    Raises:
        SpecInvalid: nothing can listen there, or somebody else does.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not _serves_here(host, int(port)):
        raise SpecInvalid(
            f"expected host:port at which this machine can listen, found {address!r}: it is not an address of this machine, or "
            "somebody listens there already"
        )
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    on_ready()
    stop.wait()
    del store


def _serves_here(host: str, port: int) -> bool:
    """Whether this machine is the one to serve, and none of its processes does yet."""
    return _is_mine(host) and not _answers(host, port)


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there: TCPStore itself prints its whole stack when nobody does."""
    with suppress(OSError), socket.create_connection((host, port), _ANSWER_S):
        return True
    return False


def _is_mine(host: str) -> bool:
    """Whether the address is one of this machine's: only then something can listen on it."""
    try:
        family, kind, _, _, (address, *_) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class _Waiting:
    """Why a call is not waited for any longer, looked at while it is."""

    def __init__(self, stop: threading.Event, still_wanted: Callable[[], None]) -> None:
        self._stop = stop
        self._still_wanted = still_wanted
        self._looks_at = time.monotonic() + _WANTED_S

    def over(self) -> bool:
        """Whether it was told to stop; raises what `still_wanted` does."""
        if time.monotonic() >= self._looks_at:
            self._still_wanted()
            self._looks_at = time.monotonic() + _WANTED_S
        return self._stop.is_set()


def _in_time(call: Callable[[], Result], seconds: float, waiting: _Waiting | None = None) -> Result | None:
    """What the call returns, made on a thread that is left behind if it does not end; None: told to stop meanwhile.

    Raises:
        NotInTime: it did not end.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as err:
            future.set_exception(err)

    threading.Thread(target=work, daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return future.result(_LOOK_S)
        except NotInTime:
            if future.done() or time.monotonic() > deadline:
                raise
            if waiting is not None and waiting.over():
                return None
