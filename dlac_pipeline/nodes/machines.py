"""Gathers the machines that train a run, attempt after attempt: those that are there, within what the job spec wants."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dlac_pipeline.checkpoint.config import config_digest
from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.nodes.crew import Crew, CutOff, agreed, free_port
from dlac_pipeline.nodes.shares import Offer, usable_ranks
from dlac_pipeline.nodes.talk import Words
from dlac_pipeline.ranks.addresses import GLOO_INTERFACE, interface_of
from dlac_pipeline.ranks.share import Share
from dlac_pipeline.spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.nodes.rendezvous import Rendezvous

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class Machines:
    """Of one job; without `launch.nodes` it is this machine alone."""

    def __init__(self, spec: JobSpec, *, ledger: str) -> None:
        """`ledger` identifies the ledger: runs of other lakehouses may have the same name, and meet at the same address."""
        self._launch = spec.launch
        self._batch_size = spec.order.batch_size
        self._rendezvous: Rendezvous | None = None
        if spec.launch.max_nodes > 1:
            with _told_by_errors():
                from dlac_pipeline.nodes.rendezvous import Rendezvous

            self._rendezvous = Rendezvous(spec.launch, f"{spec.run}@{ledger}")
            self._config = config_digest(spec)

    def gather(self, attempt: int, stop: threading.Event, still_wanted: Callable[[], None]) -> Crew | None:
        """Those that are there for the next attempt; None: told to stop meanwhile.

        `attempt` is the last one of the run that this machine has heard of; `still_wanted` raises where nobody need be
        waited for any longer.

        Raises:
            EndedElsewhere: the run has ended without this machine.
            NodesMissing: there are too few.
            SpecInvalid: another one would train something else.
        """
        if self._rendezvous is None:
            ranks = _ranks_alone(self._launch, self._batch_size)
            return Crew(Share(world_size=ranks, ranks=ranks, port=free_port()))
        while not stop.is_set():
            met = self._rendezvous.join(stop, still_wanted)
            if met is None:
                break
            self._rendezvous.check_goes_on()  # who trained may just have left
            offer = Offer(
                host=socket.gethostname(),
                address=met.address,
                interface=_chosen_interface(self._launch) or interface_of(met.address),
                config=self._config,
                ranks=_ranks_here(self._launch),
                attempt=attempt,
            )
            try:
                crew = agreed(met, offer, batch_size=self._batch_size, patience_s=self._launch.node_timeout_s)
            except CutOff:
                self._rendezvous.forget()
                continue
            if crew is not None:
                return crew
        return None

    def announce(self, words: Words) -> None:
        """Say how the run has ended, to machines that wait."""
        if self._rendezvous is not None:
            self._rendezvous.announce(words)

    def cut_off(self) -> None:
        """Meet through another connection the next time."""
        if self._rendezvous is not None:
            self._rendezvous.forget()

    def close(self) -> None:
        """Take no part any more."""
        if self._rendezvous is not None:
            self._rendezvous.leave()


@contextmanager
def _told_by_errors() -> Iterator[None]:
    """While PyTorch is imported: its C++ prints a stack for each lost connection, which Python is told of by an error anyway."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]  # it is not for the ranks


def _chosen_interface(launch: LaunchSpec) -> str:
    return launch.env.get(GLOO_INTERFACE, "") or os.environ.get(GLOO_INTERFACE, "")


def _ranks_alone(launch: LaunchSpec, batch_size: int) -> int:
    return usable_ranks(batch_size, _ranks_here(launch)) if launch.nodes else launch.world_size


def _ranks_here(launch: LaunchSpec) -> int:
    if launch.nproc_per_node:
        return launch.nproc_per_node
    import torch

    return torch.accelerator.device_count() or 1
