"""This node's membership in a run: round after round with the nodes that exist, within the limits of the job spec."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from dlac_pipeline.elastic.nodes.node_heartbeat import NodeHeartbeat
from dlac_pipeline.elastic.rank_assignment import Offer, Share, usable_ranks
from dlac_pipeline.elastic.ranks.addresses import GLOO_INTERFACE, free_port, interface_of
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.elastic.sealed_store import Message, SealedStore, shared_secret
from dlac_pipeline.lakehouse.errors import NodesMissing, SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

    from dlac_pipeline.elastic.endpoint import Endpoint

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_POLL_S = 0.05
_CONNECT_AGAIN_S = 1.0
_WANTED_EVERY_S = 5.0
_WANTED_BY = 16
"""Nodes that check this often whether the run has ended. More nodes check less often, because each check asks the catalog."""
_FAREWELL_S = 5.0
_REFUSAL_S = 2.0
"""Seconds that a node stays that serves the store and would train another job: all further nodes read the refusal."""
_RENEWED_WITHIN_S = 1.0
"""Seconds in which a leader renews its lease some times, at another address of the rendezvous."""
_AGENTS_WAIT_S = 60.0
"""Seconds that the agents of one round wait for each other. All of them exist when it is formed."""


class EndedElsewhere(Exception):
    """The nodes that trained have ended the run, and announced how."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message


class Membership:
    """Membership of one node in one run. Without `launch.nodes` it is a single node."""

    def __init__(
        self,
        name: str,
        launch: LaunchSpec,
        *,
        batch_size: int,
        config: str,
        serve_memory: Callable[[str, str], int] = lambda address, secret: 0,
    ) -> None:
        """`name`: the run among all at one address. `config`: digest of its job. Raise `SpecInvalid` without a shared secret.

        `serve_memory` serves this node's states in memory at its address to nodes with the secret, and returns the port, or 0.
        """
        self._launch = launch
        self._batch_size = batch_size
        self._endpoint: Endpoint | None = None
        self._heartbeat: NodeHeartbeat | None = None
        self._serve_memory = serve_memory
        self._ended_before: str | None = None
        self._ids_before: Collection[str] = ()
        self._looks_at = 0.0
        """Time at which a node that waits looks for a better address of the rendezvous."""
        if launch.max_nodes > 1:
            self._secret = shared_secret(launch)
            self._prefix = f"dlac/{name}"
            self._config = config
            with _quiet_import():
                from dlac_pipeline.elastic.endpoint import Endpoint

            self._endpoint = Endpoint(launch.rendezvous, timeout_s=launch.node_timeout_s)

    @classmethod
    def of_job(
        cls, spec: JobSpec, *, ledger: str, serve_memory: Callable[[str, str], int] = lambda address, secret: 0
    ) -> Membership:
        """Return the membership in a job's run. `ledger` identifies it among runs of the same name in other lakehouses."""
        # torch imports this module with its rendezvous, in programs that use neither a ledger nor DLAC.
        from dlac_pipeline.checkpoint.manifest import config_digest

        config = config_digest(spec) if spec.launch.max_nodes > 1 else ""
        batch_size = 0 if spec.launch.replicas else spec.order.batch_size  # replica groups share out any batch
        name = f"{spec.run}@{ledger}"
        return cls(name, spec.launch, batch_size=batch_size, config=config, serve_memory=serve_memory)

    def open_store(self) -> Store | None:
        """Return another connection to the store of the rendezvous, or None for a single node."""
        return None if self._endpoint is None else self._endpoint.open_client(timeout_s=_AGENTS_WAIT_S)

    def next_round(self, attempt: int, stop: threading.Event, still_wanted: Callable[[], None]) -> Round | None:
        """Return the round of the next attempt, or None if `stop` was set.

        `attempt` is the last one of the run that this node took part in. `still_wanted` is called every few seconds, and
        raises if nothing is left to wait for.

        Raises:
            EndedElsewhere: the run has ended without this node.
            NodesMissing: too few nodes came, or no rendezvous answered, for `launch.gather_timeout_s`.
            SpecInvalid: another node would train something else.
        """
        if self._endpoint is None:
            ranks = self._ranks_alone()
            return Round(Share(world_size=ranks, ranks=ranks, port=free_port()))
        endpoint, node_timeout_s = self._endpoint, self._launch.node_timeout_s
        deadline = time.monotonic() + self._launch.gather_timeout_s
        looked_at, share = time.monotonic(), random.uniform(0.5, 1.0)  # the nodes do not all look at once
        problem, sought, self._looks_at = "", False, time.monotonic() + node_timeout_s
        while not stop.is_set():
            try:
                beat = self._connected(stop)
                if beat is not None and not sought:
                    offer = endpoint.in_time(partial(self._offer, attempt), node_timeout_s, over=stop.is_set)
                    if offer is not None:
                        beat.seek(offer)
                        sought = True
            except (OSError, RuntimeError, TimeoutError) as err:
                beat, problem = None, str(err) or type(err).__name__
                stop.wait(_CONNECT_AGAIN_S)
            if beat is not None:
                found = self._look(beat)
                if found is not None:
                    return found
                if beat.others_train:
                    deadline = time.monotonic() + self._launch.gather_timeout_s
                if beat.round.cut_off or self._moves(beat, stop):
                    self.forget()
                    sought, problem = False, "the rendezvous does not answer"
            now = time.monotonic()
            if now >= deadline:
                raise self._missing(beat, problem)
            # The leader looks often whether the run has ended, and of many others each seldom.
            nodes = 1 if beat is None or beat.leads else beat.nodes_known
            if now >= looked_at + share * _WANTED_EVERY_S * max(1.0, nodes / _WANTED_BY):
                still_wanted()
                looked_at = now
            stop.wait(_POLL_S)
        return None

    def end_run(self, message: Message) -> None:
        """Announce how the run has ended, also to nodes that wait. One that does not read it finds out from the ledger."""
        if self._heartbeat is not None:
            self._heartbeat.leadership.end_run(message)

    def forget(self) -> None:
        """Use another connection for the next round. A node that serves the store keeps serving it."""
        beat, self._heartbeat = self._heartbeat, None
        if beat is not None:
            self._ended_before, self._ids_before = beat.election.ended_before, beat.slots.ids
            beat.close(leaves=False)

    def close(self) -> None:
        """Leave, so that no node waits until this one counts as lost.

        The node that serves the store leaves last, so that waiting nodes can read the outcome.
        """
        beat, self._heartbeat = self._heartbeat, None
        if beat is None or self._endpoint is None:
            return
        if self._endpoint.serves and beat.election.refused:
            time.sleep(_REFUSAL_S)
        deadline = time.monotonic() + _FAREWELL_S
        while (
            self._endpoint.serves
            and not (beat.leadership.all_know_the_end or beat.round.cut_off)
            and time.monotonic() < deadline
        ):
            time.sleep(_POLL_S)
        beat.close(leaves=True)

    def _connected(self, stop: threading.Event) -> NodeHeartbeat | None:
        """Return the heartbeat of this node, started if necessary, or None if `stop` was set."""
        if self._heartbeat is None:
            assert self._endpoint is not None, "of several nodes"
            connect = partial(self._endpoint.connect, self._is_trained)
            store = self._endpoint.in_time(connect, 2.0 * self._launch.node_timeout_s, over=stop.is_set)
            if store is None:
                return None
            self._heartbeat = NodeHeartbeat(
                SealedStore(store, self._secret, self._prefix),
                self._launch,
                batch_size=self._batch_size,
                ended_before=self._ended_before,
                ids_before=self._ids_before,
            )
        return self._heartbeat

    def _moves(self, beat: NodeHeartbeat, stop: threading.Event) -> bool:
        """Return True if this node has waited for long where no node trains, and moves to a better address."""
        endpoint, now, patience_s = self._endpoint, time.monotonic(), self._launch.node_timeout_s
        is_due = now >= self._looks_at
        if is_due or beat.others_train:
            self._looks_at = now + patience_s
        if endpoint is None or "," not in self._launch.rendezvous or beat.others_train or not is_due:
            return False
        found = None
        with suppress(OSError, RuntimeError, TimeoutError):
            find = partial(endpoint.find_better, self._is_trained)
            found = endpoint.in_time(find, 2.0 * patience_s, over=stop.is_set)
        if found is not None:
            endpoint.move(found)
        return found is not None

    def _is_trained(self, store: Store) -> bool:
        """Return True if a leader of this run renews its lease at another store, and trains."""
        sealed = SealedStore(store, self._secret, self._prefix)
        before = sealed.read("lease").message
        time.sleep(_RENEWED_WITHIN_S)
        after = sealed.read("lease").message
        return after is not None and after != before and bool(after["training"])

    def _look(self, beat: NodeHeartbeat) -> Round | None:
        """Return the round that this node is a member of by now. Raise `EndedElsewhere` or `SpecInvalid` if none follows."""
        plan, place = beat.plan, beat.place
        if plan is not None and place is not None:
            return Round(plan.share(place), plan=plan, heartbeat=beat)
        if beat.election.end is not None:
            raise EndedElsewhere(beat.election.end)
        if beat.election.refused:
            raise SpecInvalid(
                f"expected the same training job on all nodes, {beat.election.refused}: start all with the same job spec "
                "(sources, order, params), script and arguments"
            )
        return None

    def _offer(self, attempt: int) -> Offer:
        assert self._endpoint is not None, "of several nodes"
        address, env = self._endpoint.local_address(), self._launch.env
        return Offer(
            host=socket.gethostname(),
            address=address,
            interface=env.get(GLOO_INTERFACE) or os.environ.get(GLOO_INTERFACE) or interface_of(address),
            config=self._config,
            ranks=_ranks_here(self._launch),
            attempt=attempt,
            memory_port=self._serve_memory(address, self._secret),
        )

    def _ranks_alone(self) -> int:
        """Return the number of ranks of a run on this node. Raise `SpecInvalid` if they are too few for a replica."""
        launch = self._launch
        if not launch.nodes:
            return launch.world_size
        ranks = _ranks_here(launch)
        if usable := usable_ranks(self._batch_size, ranks, launch.mesh):
            return usable
        raise SpecInvalid(
            f"expected {launch.mesh.replica_ranks} ranks for a replica of the model, found {ranks} on this node: raise "
            "launch.nproc_per_node, or correct launch.mesh"
        )

    def _missing(self, beat: NodeHeartbeat | None, problem: str) -> NodesMissing:
        launch = self._launch
        assert self._endpoint is not None, "of several nodes"
        if beat is not None:
            problem = f"only {beat.election.nodes_ready}"
            if beat.election.is_foreign:
                problem = "nodes with another key: give all nodes the same one"
        replica = launch.mesh.replica_ranks
        with_ranks = f" with {replica} ranks for a replica of the model" if replica > 1 else ""
        return NodesMissing(
            f"expected {launch.nodes} nodes{with_ranks} at {launch.rendezvous!r} within {launch.gather_timeout_s:.0f} s, found "
            f"{problem}; "
            f"start the same command on the others, the one with that address first{self._endpoint.hint}"
        )


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Import PyTorch so that its C++ prints no stack for each lost connection. Python gets an error anyway."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]  # it is not for the ranks


def _ranks_here(launch: LaunchSpec) -> int:
    if launch.nproc_per_node:
        return launch.nproc_per_node
    import torch

    return torch.accelerator.device_count() or 1
