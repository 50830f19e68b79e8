"""How machines meet: torchrun's rendezvous, which says who takes part in a round and gives them a store to talk through.

In: a host:port. Out: round after round, this machine's place among those that are there. One of the machines serves the store.
The calls of a network that has gone silent may block without end, so none is made on the caller's thread.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousState,
    create_handler,
)

from catalog.errors import NodesMissing, RendezvousInvalid, SpecInvalid
from dlac_pipeline.launch_spec import LaunchSpec, check_port
from dlac_pipeline.nodes.rendezvous_state import decode_state, encode_state
from dlac_pipeline.nodes.talk import EndedElsewhere, Round, Words
from dlac_pipeline.ranks.addresses import own_address, stands_for_loopback
from dlac_pipeline.ranks.process_group import serve_store

Result = TypeVar("Result")
_LOOK_S = 0.1
_AGAIN_S = 1.0
_WANTED_S = 5.0
_ANSWER_S = 2.0
_KEEP_ALIVES = 3
_MARGIN_S = 10.0
"""For a call beyond its own time-out: then it is the network that is silent."""
_LEAVING = "leaving"
logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.CRITICAL)
"""Else it warns each second of a store that is gone, which `Talk` has noticed."""
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
"""Else a machine that comes later waits for the address of a store that rank 0 gave in the first round only (torch 2.13)."""


class Rendezvous:
    """This machine's part in the rendezvous of a run."""

    def __init__(self, launch: LaunchSpec, name: str) -> None:
        """`name` is the run's, and no other's that meets at the same address."""
        self._launch = launch
        self._name = name
        self._host, port = _endpoint_of(launch.rendezvous)
        self._port = int(port)
        self._handler: DynamicRendezvousHandler | None = None
        self._backend: _Backend | None = None
        self._store: TCPStore | None = None
        self._serves = False
        self._ended_before: bytes | None = None
        self._has_looked = False

    def join(self, stop: threading.Event, still_wanted: Callable[[], None]) -> Round | None:
        """Take part in the next round, behind the one that this machine is in; None: told to stop meanwhile.

        `still_wanted` is called every few seconds, and raises where there is nothing left to wait for.

        Raises:
            EndedElsewhere: the run has ended without this machine.
            NodesMissing: too few machines came, or nobody served the rendezvous, for `launch.gather_timeout_s`.
            RendezvousInvalid: the rendezvous has content that no DLAC wrote.
        """
        deadline = time.monotonic() + self._launch.gather_timeout_s
        while not stop.is_set():
            left_s = max(_AGAIN_S, deadline - time.monotonic())
            try:
                met = self._join(stop, still_wanted, left_s)
                if met is None or met.count >= self._launch.min_nodes:
                    return met
                problem = f"only {met.count}, perhaps as clocks differ by seconds"
            except RendezvousTimeoutError as err:
                if self._others_train():  # it has just looked
                    deadline = time.monotonic() + self._launch.gather_timeout_s
                    continue
                problem = str(err)
                self.forget()
            except RendezvousStateError as err:
                raise RendezvousInvalid(
                    f"expected the state of a rendezvous of this DLAC at {self._launch.rendezvous!r}, found {err}: stop what "
                    "writes there, start the rendezvous again, and keep its port within the cluster"
                ) from err
            except (RendezvousError, RuntimeError, OSError, NotInTime) as err:
                problem = str(err) or type(err).__name__
                self.forget()
            if time.monotonic() >= deadline - _AGAIN_S:
                raise NodesMissing(
                    f"expected {self._launch.nodes} nodes at {self._launch.rendezvous!r} within "
                    f"{self._launch.gather_timeout_s:.0f} s, found too few, or nobody there: {problem}; start the same command "
                    f"on the others, the one with that address first{_hint_of_loopback(self._host)}"
                )
            still_wanted()
            stop.wait(_AGAIN_S)
        return None

    def announce(self, words: Words) -> None:
        """Say how the run has ended, to machines that wait; one that does not hear it finds out from the ledger, or trains on."""
        store = self._store
        if store is not None:
            told = json.dumps({**words, "at": time.time()})
            with suppress(RuntimeError, OSError, NotInTime):
                _in_time(lambda: store.set(self._ended_key, told), _ANSWER_S)

    def check_goes_on(self) -> None:
        """Raise EndedElsewhere if others have ended the run since this machine came; a store that is away says nothing."""
        with suppress(RuntimeError, OSError, NotInTime):
            found = _in_time(self._ended, _ANSWER_S)
            if found is not None and found != self._ended_before:
                raise EndedElsewhere(json.loads(found))

    def _others_train(self) -> bool:
        """Whether there is a round that this machine is too many for: then it waits until somebody is missing."""
        handler = self._handler
        return handler is not None and bool(handler._state_holder.state.complete)

    def forget(self) -> None:
        """Meet through another connection the next time; whoever serves the store goes on serving it."""
        handler, self._handler = self._handler, None
        if self._backend is not None:
            self._backend.closed = True  # a call that is left behind on its thread takes no part any more
        if handler is not None:
            threading.Thread(target=handler._stop_heartbeats, daemon=True).start()
        if not self._serves:
            self._store = None

    def leave(self) -> None:
        """Take no part any more, so that the others need not wait until this machine counts as lost.

        Who serves the store leaves last: those that wait hear of the run's end from there.
        """
        handler, backend = self._handler, self._backend
        if handler is None or backend is None:
            return
        with suppress(RendezvousError, RuntimeError):
            if self._serves and self._ended() != self._ended_before:
                _see_off(backend)
        self._handler = None
        backend.only = _LEAVING  # not the call that may be left behind

        def left() -> None:  # its shutdown() would close the rendezvous for all
            handler._stop_heartbeats()
            handler._op_executor.run(_leaves, time.monotonic() + _AGAIN_S)

        with suppress(RendezvousError, RuntimeError, NotInTime):
            _in_time(left, 2 * _AGAIN_S, name=_LEAVING)

    def _join(self, stop: threading.Event, still_wanted: Callable[[], None], left_s: float) -> Round | None:
        def look() -> None:
            self.check_goes_on()
            still_wanted()

        waiting = _Waiting(stop, look)
        if self._handler is None:
            self._handler = _in_time(lambda: self._met(left_s), left_s, waiting)
        handler = self._handler
        info = None if handler is None else _in_time(handler.next_rendezvous, left_s + _MARGIN_S, waiting)
        if handler is None or info is None:
            return None

        def others_waiting() -> int:
            with suppress(RendezvousError):
                return handler.num_nodes_waiting()
            return 0

        address = self._address()
        return Round(index=info.rank, count=info.world_size, store=info.store, waiting=others_waiting, address=address)

    def _met(self, left_s: float) -> DynamicRendezvousHandler:
        launch = self._launch
        if self._store is None:
            self._store = self._opened()
        if not self._has_looked:  # once: what stands there when this machine comes back may be of those that went on
            self._ended_before = self._ended()
            self._has_looked = True
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=launch.rendezvous,
            run_id=self._name,
            min_nodes=launch.min_nodes,
            max_nodes=launch.max_nodes,
            local_addr=self._address(),
            join_timeout=max(1, int(left_s)),
            last_call_timeout=launch.last_call_s,
            keep_alive_interval=max(1, launch.node_timeout_s // _KEEP_ALIVES),
            keep_alive_max_attempt=_KEEP_ALIVES,
        )
        self._backend = _Backend(self._store, self._name)
        return create_handler(self._store, self._backend, parameters)

    def _address(self) -> str:
        """At which the others reach this machine."""
        own = own_address(self._host)
        if own:
            return own
        family, kind, _, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(where)
            return str(probe.getsockname()[0])

    @property
    def _ended_key(self) -> str:
        return f"dlac/ended/{self._name}"

    def _ended(self) -> bytes | None:
        store = self._store
        return bytes(store.get(self._ended_key)) if store is not None and store.check([self._ended_key]) else None

    def _opened(self) -> TCPStore:
        patience = timedelta(seconds=self._launch.node_timeout_s)
        own = own_address(self._host)
        if own and not _answers(own, self._port):
            self._serves = True
            return serve_store(own, self._port, timeout=patience)
        self._serves = False
        if not _answers(own or self._host, self._port):
            raise OSError(f"nobody answers at {self._launch.rendezvous!r}")
        return TCPStore(own or self._host, self._port, is_master=False, wait_for_workers=False, timeout=patience)


def _leaves(context: _RendezvousContext, deadline: float) -> _Action:
    """What a machine does next that leaves: one that waits, waits no longer."""
    if context.node in context.state.wait_list:
        return _Action.REMOVE_FROM_WAIT_LIST
    if context.node in context.state.redundancy_list:
        return _Action.REMOVE_FROM_REDUNDANCY_LIST
    return _RendezvousExitOp()(context, deadline)


class _Backend(C10dRendezvousBackend):
    """The place of the rendezvous' state, closed to calls that their caller no longer waits for.

    PyTorch's handler pickles and unpickles the state. The store has JSON: what the handler unpickles was pickled right here.
    """

    def __init__(self, store: TCPStore, name: str) -> None:
        super().__init__(store, name)
        self.closed = False
        self.only = ""
        """The name of the one thread that may call; empty: all."""

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state, as of now."""
        found = self._read_state()
        return None if found is None else (pickle.dumps(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Change it, unless others did."""
        self._check_open()
        done = super().set_state(encode_state(pickle.loads(state)), token)  # pickled by this process a moment ago
        if done is None or len(done) == 2:
            return done
        content, token, has_set = done
        return pickle.dumps(decode_state(content)), token, has_set

    def somebody_waits(self) -> bool:
        """Whether there is a machine beside those that take part."""
        found = self._read_state()
        return found is not None and bool(found[0].wait_list or found[0].redundancy_list)

    def _read_state(self) -> tuple[_RendezvousState, Any] | None:
        """Return the state of the store and its token; None: there is none yet."""
        self._check_open()
        found = super().get_state()
        return None if found is None else (decode_state(found[0]), found[1])

    def _check_open(self) -> None:
        if self.closed or self.only not in ("", threading.current_thread().name):
            raise RendezvousConnectionError("this machine takes no part any more")


def _see_off(backend: _Backend) -> None:
    """Wait until nobody waits any more, for as long as those that do need to look."""
    deadline, looks = time.monotonic() + 2 * _WANTED_S, 0
    while looks < 2 and time.monotonic() < deadline:  # one that goes from one list to the other is in neither
        looks = 0 if backend.somebody_waits() else looks + 1
        time.sleep(_LOOK_S)


def serve(address: str, stop: threading.Event, on_ready: Callable[[], None]) -> None:
    """Serve a rendezvous at host:port until told to stop, on a machine that outlives those that meet there.

    Raises:
        SpecInvalid: nothing can listen there, or somebody else does.
    """
    try:
        check_port(address)
    except ValueError as err:
        raise SpecInvalid(str(err)) from err
    host, port = _endpoint_of(address)
    own = own_address(host) if host else ""
    try:
        if not own or _answers(own, int(port)):
            raise OSError("it is not an address of this machine, or somebody listens there already")
        store = serve_store(own, int(port))
    except OSError as err:
        raise SpecInvalid(f"expected host:port at which this machine can listen, found {address!r}: {err}") from err
    on_ready()
    stop.wait()
    del store


def _endpoint_of(address: str) -> tuple[str, str]:
    """Return host and port of host:port, where an IPv6 address has brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _hint_of_loopback(host: str) -> str:
    """Return what to write where a host stands for this node alone; empty where other nodes may reach it."""
    if not stands_for_loopback(host):
        return ""
    return (
        f"; {host!r} stands for a loopback address on this node: give an IP address, or a name that other nodes resolve"
    )


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there: TCPStore itself prints its whole stack when nobody does."""
    with suppress(OSError), socket.create_connection((host, port), _ANSWER_S):
        return True
    return False


class _Waiting:
    """Why a call is not waited for any longer, looked at while it is."""

    def __init__(self, stop: threading.Event, look: Callable[[], None]) -> None:
        """`look` is called every few seconds, and raises to end the waiting."""
        self._stop = stop
        self._look = look
        self._looks_at = time.monotonic() + _WANTED_S

    def over(self) -> bool:
        """Whether it was told to stop; raises what `look` does."""
        if time.monotonic() >= self._looks_at:
            self._look()
            self._looks_at = time.monotonic() + _WANTED_S
        return self._stop.is_set()


def _in_time(
    call: Callable[[], Result], seconds: float, waiting: _Waiting | None = None, *, name: str | None = None
) -> Result | None:
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

    threading.Thread(target=work, name=name, daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return future.result(_LOOK_S)
        except NotInTime:
            if future.done():
                return future.result()
            if time.monotonic() > deadline:
                raise
            if waiting is not None and waiting.over():
                return None
