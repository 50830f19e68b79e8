"""The job of a run under chaos: a user's job under another name, on this node alone, with proxies before its servers."""

import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

import psutil

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.elastic.ranks.addresses import LOOPBACK, free_port
from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.extensions.chaos.proxy import NetworkProxy
from dlac_pipeline.extensions.chaos.strikes import move_catalog, move_folder, restore_catalog, way_back
from dlac_pipeline.lakehouse.config import sqlite_file
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.lakehouse.own_folders import remove_own
from dlac_pipeline.lakehouse.store_files import is_local, path_at
from dlac_pipeline.memory_states import states
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

_PORTS = {"http": 80, "thrift": 9083, "postgresql": 5432, "postgresql+psycopg2": 5432, "postgresql+psycopg": 5432}
"""Schemes of servers before which a proxy can stand, with their usual ports. The certificate of https names its host."""
_ENDPOINT = "s3.endpoint"
_MEMORY = re.compile(r"dlac-chaos-(\d+)-.*")
"""Name of a node's folder of shared memory, with the process id of its command."""


def chaos_spec(job: JobSpec, *, run: str, steps: int | None, cascade: int = 1) -> JobSpec:
    """Return a resolved job as the run `run` on this node, without listeners. Raise `SpecInvalid` if it cannot run here."""
    if job.launch.on != "here":
        raise SpecInvalid(
            f'expected launch.on = "here", found {job.launch.on!r}: chaos strikes processes of this node, so copy the job file, '
            "remove launch.on there, and set launch.nodes or launch.world_size to what fits this node"
        )
    # Otherwise rows would be quarantined for the faults that strike at them, and a cascade would be too many attempts in vain.
    attempts = max(job.launch.attempts_without_progress, cascade + 1)
    faulted = {"deaths_at_same_rows": 0, "attempts_without_progress": attempts}
    launch: dict[str, Any] = {**job.launch.model_dump(), **faulted}
    if job.launch.max_nodes > 1:
        launch |= {"rendezvous": f"{LOOPBACK}:{free_port()}", "rendezvous_key_file": ""}
    order = {**job.order.model_dump(), **({} if steps is None else {"steps": steps})}
    changed = {"run": run, "order": order, "launch": launch}
    receivers = {name for name, section in job.sections.items() if section.event_receiver(job) is not None}
    return parse_spec({**job.model_dump(exclude=receivers), **changed}, origin="the job under chaos")


def restore_catalog_of(job: JobSpec) -> Path | None:
    """Move a job's catalog of local files back that a killed command has left aside. Return it, or None if there was none."""
    file = sqlite_file(job.lakehouse.uri)
    return file if file is not None and restore_catalog(file) else None


class ChaosJob:
    """A job of `chaos_spec`, the memory of each of its nodes, and its catalog and store, which can be made unavailable."""

    def __init__(self, spec: JobSpec, kinds: Collection[str]) -> None:
        """`kinds` are kinds of faults. Raise `SpecInvalid` for a kind that cannot be done with this job."""
        self.spec = spec
        self.environment: Mapping[str, str] = {**os.environ, KEY_VARIABLE: secrets.token_hex(16)}
        """Environment of its nodes, with the secret that they share."""
        self._memories: dict[int, Path] = {}
        self._proxies: dict[str, NetworkProxy] = {}
        """Proxy before each server, by the server's address."""
        self._places: dict[str, Path | NetworkProxy] = {}
        if not {"catalog", "network"}.isdisjoint(kinds):
            self._prepare_catalog(required="catalog" in kinds)
        if not {"store", "network"}.isdisjoint(kinds):
            self._prepare_store(required="store" in kinds, whole_warehouse="network" in kinds)
        if "network" in kinds and not self._proxies:
            raise SpecInvalid(
                f"expected a catalog or a checkpoint store on a network for the kind network, found the catalog "
                f"{spec.lakehouse.address!r} and the store {spec.checkpoint.store!r}, before which no proxy can stand: leave "
                "network out. The kinds catalog and store make local files unavailable"
            )

    def spec_of(self, node: int) -> JobSpec:
        """Return the job spec of a node by its number, from 0. Each of several nodes has another folder for memory."""
        spec, memory = self.spec, self.spec.checkpoint.memory
        if spec.launch.max_nodes == 1 or not memory or not Path(memory).is_dir():
            return spec
        if node not in self._memories:
            _remove_left_memories(Path(memory))
            self._memories[node] = Path(mkdtemp(prefix=f"dlac-chaos-{os.getpid()}-{node}-", dir=memory))
        own = str(self._memories[node])
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"memory": own})})

    def forget_memory(self, node: int) -> None:
        """Remove the states that a node keeps in memory, as its loss does."""
        folder = states.memory_folder(self.spec_of(node))
        if folder is not None:
            states.remove(folder)

    def has_target(self, kind: str) -> bool:
        """Return whether an outage has something to take away. A separate store has no folder of the run at first."""
        place = self._places.get(kind)
        return not isinstance(place, Path) or os.path.lexists(place)

    @contextmanager
    def outage(self, kind: str, chance: Random) -> Iterator[str]:
        """Make catalog, store, or the network to servers unavailable within the context. Yield a description."""
        silent = kind == "network" and chance.random() < 0.5
        place = self._places.get(kind)
        cut = list(self._proxies.values()) if kind == "network" else [place] if isinstance(place, NetworkProxy) else []
        if cut and not any(proxy.is_used for proxy in cut):
            raise SpecInvalid(
                f"expected the run to connect through a proxy before {' and '.join(self._proxies)}, found no connection: its "
                f"catalog or environment names another address, so leave the kind {kind} out"
            )
        with ExitStack() as stack:
            if kind == "network":
                for proxy in cut:
                    stack.enter_context(proxy.outage(silent=silent))
                yield f"connections to {' and '.join(self._proxies)} {'silent' if silent else 'cut'}"
            elif isinstance(place, NetworkProxy):
                stack.enter_context(place.outage(silent=False))
                yield f"connections to the {kind} cut"
            elif place is not None:
                stack.enter_context(move_catalog(place) if kind == "catalog" else move_folder(place))
                yield f"{place.name} moved aside"

    def way_back(self, kind: str) -> str:
        """Return the command that ends an outage of local files if this process cannot. Empty for a proxy, which ends with it."""
        place = self._places.get(kind)
        return way_back(place) if isinstance(place, Path) else ""

    def close(self) -> None:
        """End the proxies, and remove the memories of several nodes."""
        for proxy in self._proxies.values():
            proxy.close()
        for memory in self._memories.values():
            with suppress(OSError):
                remove_own(memory.parent, memory.name)

    def _prepare_catalog(self, *, required: bool) -> None:
        lakehouse = self.spec.lakehouse
        file = sqlite_file(lakehouse.uri)
        if file is not None:
            self._places["catalog"] = file
        elif uri := self._put_proxy("catalog", lakehouse.uri, setting="lakehouse.uri", required=required):
            self.spec = self.spec.model_copy(update={"lakehouse": lakehouse.model_copy(update={"uri": uri})})

    def _prepare_store(self, *, required: bool, whole_warehouse: bool) -> None:
        lakehouse, checkpoint = self.spec.lakehouse, self.spec.checkpoint
        address = tiers_of(self.spec).durable_run()
        if is_local(address):
            self._places["store"] = path_at(address)
        else:
            endpoint = {**lakehouse.properties, **checkpoint.store_properties}.get(_ENDPOINT, "")
            uri = self._put_proxy("store", endpoint, setting=f"{_ENDPOINT} of the store", required=required)
            if uri:
                properties = {**checkpoint.store_properties, _ENDPOINT: uri}
                checkpoint = checkpoint.model_copy(update={"store_properties": properties})
        if whole_warehouse and (endpoint := lakehouse.properties.get(_ENDPOINT, "")):
            uri = self._put_proxy("warehouse", endpoint, setting=f"lakehouse.properties {_ENDPOINT}", required=False)
            properties = {**lakehouse.properties, **({_ENDPOINT: uri} if uri else {})}
            lakehouse = lakehouse.model_copy(update={"properties": properties})
        self.spec = self.spec.model_copy(update={"lakehouse": lakehouse, "checkpoint": checkpoint})

    def _put_proxy(self, name: str, uri: str, *, setting: str, required: bool) -> str:
        """Put a proxy before a server, and return its address as `uri` has it. Empty if none can stand there."""
        parts, port = urlsplit(uri), None
        with suppress(ValueError):  # an address of several servers
            port = parts.port or _PORTS.get(parts.scheme)
        if parts.scheme not in _PORTS or not parts.hostname or port is None:
            if required:
                raise SpecInvalid(
                    f"expected {setting} with http:// or postgresql:// and a host, so that a proxy can stand before it, found "
                    f"{mask_secrets(uri)!r}: leave the kind {name} out"
                )
            return ""
        server = f"{parts.hostname}:{port}"
        proxy = self._proxies.get(server) or NetworkProxy(parts.hostname, port)
        self._proxies[server] = self._places[name] = proxy
        credentials, separator, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{credentials}{separator}{proxy.address}").geturl()


def _remove_left_memories(memory: Path) -> None:
    """Remove this user's memories of nodes whose command was killed."""
    for name in os.listdir(memory):
        found = _MEMORY.fullmatch(name)
        if found and not psutil.pid_exists(int(found[1])):
            with suppress(OSError):  # of another user
                remove_own(memory, name)
