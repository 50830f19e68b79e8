"""Replica group among its peers: quorums, reductions and healing by torchft's manager.

In: the state of the group, and the gradients of a step. Out: the group's share of each step, and the reduced step if it commits.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp

from dlac_pipeline.checkpoint.step_sync import RankReport
from dlac_pipeline.elastic.ranks.addresses import LOOPBACK
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.elastic.ranks.process_group import serve_store
from dlac_pipeline.extensions.replicas.rank import (
    HANG_MARGIN_S,
    LighthouseProcess,
    has_reached,
    is_dead,
    read_lighthouse,
    url_host,
    write_presence,
)
from dlac_pipeline.lakehouse.errors import ScriptInvalid, TrainingFailed
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.spec.launch_spec import NOTICES
from dlac_pipeline.supervise.liveness.heartbeat import Phase, read_heartbeat

_CONNECT_S = 10.0
_HEARTBEAT_S = 0.05
_LOOK_S = 0.02
"""Seconds between two looks at the launch folder."""
_BUCKET_BYTES = 25 * 2**20
_MOST_FAILED = 10
"""Quorums in a row in which a newcomer may fail to get a state. Its peers drop a step with each."""
_NO_STATE = -1
"""Step of a group without a state. Any peer is ahead of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """Facts of a step that committed, equal in all groups that took part."""

    loss: float
    """Mean over the samples of the global batch."""
    report: RankReport
    """Notices that any rank has received, and the checkpoints that the committer's first rank plans."""
    head_step: int
    """Step of the last checkpoint that the committer knows."""
    groups: tuple[int, ...]
    """Numbers of the groups that took part."""


class _Outcome(Enum):
    """Outcome of an attempt to form a quorum."""

    MET = auto()
    FAILED = auto()
    LOST = auto()
    """The lighthouse is lost, or was when the quorum had been formed."""


class State(Protocol):
    """The state that a newcomer gets from a peer."""

    @property
    def step(self) -> int:
        """The last committed step."""

    def peer_state(self) -> dict[str, Any]:
        """Return it, for a peer."""

    def load_peer_state(self, state: dict[str, Any]) -> None:
        """Load a peer's."""


class GroupLaunch:
    """The launch of the groups, as a group sees it. A supervisor starts all groups, and ends a launch without the state."""

    def __init__(self, folder: Path, *, rejoins: bool) -> None:
        self.folder = folder
        """The launch folder."""
        self.address, self.key = LOOPBACK, b""
        """Address of this node for the groups, and the key by which those on several nodes know each other."""
        self.rejoins = rejoins
        """True if this process replaces a dead one of the same attempt. It needs the state of a peer."""

    def met(self) -> None:
        """Note, on the first rank after each quorum, that the group has the state."""

    def is_abandoned(self) -> bool:
        """Return True if no group has the state any more."""
        return False

    def may_come(self, group: int) -> bool:
        """Return False if a group was not started in time."""
        return True


class ReplicaGroup:
    """A replica group. Its methods are collective over the groups present, and are called in the order of the steps."""

    def __init__(
        self, number: int, groups: int, launch: GroupLaunch, communicator: Communicator, *, limit_s: float
    ) -> None:
        """`number` is the group's, among at most `groups`.

        `communicator` has the ranks of the group. `limit_s` is the limit of a collective, in which peers wait for a newcomer.
        """
        self.number = number
        self.report: Callable[[], RankReport] = RankReport
        """Returns this rank's own report."""
        self.head_step = 0
        """Step of the last checkpoint that this group knows."""
        self.share = DataCoordinate(number, groups)
        """Place in the last quorum, and number of groups in it."""
        self.reduced: Reduced | None = None
        """The last step, if it committed."""
        self.execution = 0
        """Digest of the quorum in which the last step of the group, or of the peer that healed it, was done. 0 at first.

        A step may be done twice: by groups that committed it, and then by a group that did not, alone.
        """
        self._has_diverged = False
        """True if the group has done its last step in another quorum than its peers."""
        self._groups = groups
        self._launch, self._folder = launch, launch.folder
        self._communicator = communicator
        self._is_first = communicator.rank == 0
        """True for the rank that speaks for its group, and serves its manager."""
        self._lighthouse = ""
        """Address of the lighthouse that this group has reached."""
        self._step: int | None = None
        """Step of the group when it left its peers."""
        self._awaited: Sequence[int] = () if launch.rejoins else range(groups)
        """Groups to wait for, before the first quorum of a lighthouse. A quorum without them would be followed by another one."""
        self._limit_s = limit_s
        self._reached = ""
        """The lighthouse that others know this group to have reached."""
        self.has_peers = False
        """True once a quorum was formed."""
        self.has_met = False
        """True if the last quorum has not been used by a step."""
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of each wait for peers."""
        self._state: State | None = None
        self._manager: Any = None
        self._peers: Any = None

    @property
    def rejoins(self) -> bool:
        """True if this group needed the state of a peer when it began."""
        return self._launch.rejoins

    @property
    def coordinate(self) -> DataCoordinate:
        """Share of this rank among the ranks of the last quorum."""
        own = self._communicator.coordinate
        return DataCoordinate(self.share.index * own.count + own.index, self.share.count * own.count)

    @property
    def commits(self) -> bool:
        """True if this group takes the checkpoints of its attempt."""
        return self.share.index == 0

    def join(self, state: State) -> None:
        """Take part with this state. A process that rejoins has none until its first quorum."""
        self._state = state

    def meet(self) -> None:
        """Form the next quorum, unless the last one was not used.

        If the group's last step is not its peers' last one, it loads the state of a peer.
        Raise `TrainingFailed` if no group has the state.
        """
        failures = 0
        while not self.has_met:
            if self._manager is None and not self._connect():
                continue
            before = self._manager.current_step()
            outcome = self._start_quorum()
            has_healed = self._manager.current_step() != before
            lost, failed, healed, diverged = self._sums(
                outcome is _Outcome.LOST, outcome is _Outcome.FAILED, has_healed, self._has_diverged
            )
            if healed == self._communicator.world_size:
                diverged = self._has_diverged = False
            elif healed:  # the ranks of the group have states of two steps
                self._set_step(_NO_STATE)
            if lost:
                self._disconnect()
            elif diverged:
                self._drop(())
                self._set_step(_NO_STATE)
                self._has_diverged = False
            elif failed:
                failures += 1
                if failures == _MOST_FAILED and not self.has_peers and self.rejoins:
                    raise TrainingFailed(
                        f"expected group {self.number} to get the state of a peer, found {failures} failures in a row, the last: "
                        f"{self._error()}"
                    )
                self._drop(())
            elif self._manager.current_step() == _NO_STATE:
                raise self._no_state()
            else:
                self.share = DataCoordinate(self._manager.participating_rank(), self._manager.num_participants())
                self.has_met = self.has_peers = True
                if self._is_first:
                    self._launch.met()
                self._announce()

    def _no_state(self) -> TrainingFailed:
        return TrainingFailed(
            f"expected another replica group with the state of the run, found none: group {self.number} cannot rejoin"
        )

    def _error(self) -> object:
        """Return the error of this rank since the last quorum."""
        error = self._manager.errored()
        return "that of another rank of the group" if error is None else error.original_exception

    def _connect(self) -> bool:
        """Make the group known to the lighthouse that runs, and wait for its peers. Return False if it is lost meanwhile.

        A group that replaces a dead one becomes known with its first quorum, because its peers wait for a group that is known.
        """
        assert self._state is not None, "a script restores its state before the first batch"
        if self._step is None:
            self._step = _NO_STATE if self.rejoins else self._state.step
        port = 0
        if self._is_first:
            found = self._await_lighthouse()
            self._lighthouse, self._store = found.address, serve_store(self._launch.address, 0)
            port = self._try_to_make_manager(self._state, self._store.port) * self._store.port
        answer = self._communicator.tree.broadcast(json.dumps([self._lighthouse, port]).encode())
        self._lighthouse, port = json.loads(answer)
        if port and not self._is_first:
            self._try_to_make_manager(self._state, port)
        (missing,) = self._sums(self._manager is None)
        if missing:
            self._disconnect()
            return False
        if self._is_first:
            self.wait_for_peers()
        return True

    def _await_lighthouse(self) -> LighthouseProcess:
        deadline = time.monotonic() + self._limit_s
        while (found := read_lighthouse(self._folder)) is None:
            if time.monotonic() > deadline:
                raise TrainingFailed(
                    f"expected a lighthouse of the replica groups, found none after {self._limit_s:.0f} s: its log is in "
                    f"{self._folder}, or that of the fork server above it"
                )
            time.sleep(_LOOK_S)
        return found

    def _announce(self) -> None:
        """Tell all further groups that this one has the state, and has reached its lighthouse."""
        if self._is_first and self._reached != self._lighthouse:
            write_presence(self._folder, self.number, self._lighthouse)
            self._reached = self._lighthouse

    def wait_for_peers(self) -> None:
        """Wait for the groups of the first quorum. A group without a state waits for one that has it."""
        deadline = time.monotonic() + self._limit_s
        if self.has_peers or self._step != _NO_STATE:
            self._announce()
        if self._step == _NO_STATE:
            others = [each for each in range(self._groups) if each != self.number]
            while not any(map(self._has_reached, others)) and self._may_wait(deadline):
                if self._launch.is_abandoned():
                    raise self._no_state()
                time.sleep(_LOOK_S)
            return
        awaited = set(self._awaited)
        while awaited and self._may_wait(deadline):
            # The new process of a dead group waits for this group, which has a state.
            missing = {each for each in awaited if not self._has_reached(each) and not is_dead(self._folder, each)}
            awaited = set(filter(self._launch.may_come, missing))
            time.sleep(_LOOK_S if awaited else 0.0)

    def _may_wait(self, deadline: float) -> bool:
        return not self._is_lighthouse_lost() and time.monotonic() < deadline

    def _try_to_make_manager(self, state: State, port: int) -> bool:
        """Make this rank's manager, with the group's store at a port. Return False if the lighthouse is lost meanwhile."""
        try:
            self._manager = self._make_manager(state, port)
            self._set_step(self._step or 0)
        except RuntimeError:
            if not self._is_lighthouse_lost():
                raise
        return self._manager is not None

    def _make_manager(self, state: State, port: int) -> Any:
        from torchft import Manager  # optional

        from dlac_pipeline.extensions.replicas.peers import NodeWatch, Peers, StateServer

        if self._waiting is nullcontext and self._launch.address != LOOPBACK:
            self._waiting = NodeWatch(self._launch.address, lambda: self._lighthouse).waiting
        limit = timedelta(seconds=self._limit_s)
        self._peers = Peers(timeout=timedelta(seconds=_CONNECT_S))
        self._peers.collective_timeout = limit
        return Manager(
            pg=self._peers,
            load_state_dict=state.load_peer_state,
            state_dict=state.peer_state,
            checkpoint_transport=StateServer(limit, self._launch.address, self._launch.key),
            min_replica_size=1,
            use_async_quorum=False,  # the share must be known before the batch is read
            timeout=limit,
            quorum_timeout=limit + timedelta(seconds=HANG_MARGIN_S),  # the lighthouse gives up on stragglers before
            connect_timeout=timedelta(seconds=_CONNECT_S),
            rank=self._communicator.rank,
            world_size=self._communicator.world_size,
            store_addr=self._launch.address,
            store_port=port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"group-{self.number:05d}",  # quorums are in the order of these names
            hostname=url_host(self._launch.address),
            heartbeat_interval=timedelta(seconds=_HEARTBEAT_S),
            init_sync=False,  # the groups begin with the same state
        )

    def _set_step(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def _sums(self, *flags: bool) -> list[int]:
        """Return how many ranks of the group have each flag. Collective."""
        numbers = torch.tensor(flags, dtype=torch.int64)
        self._communicator.add(numbers)
        return [int(number) for number in numbers.tolist()]

    def _has_reached(self, group: int) -> bool:
        """Return True if a group has reached this group's lighthouse, or has ended."""
        heartbeat = read_heartbeat(self._folder, group * self._communicator.world_size)
        has_ended = heartbeat is not None and heartbeat.phase == Phase.DONE
        return has_ended or has_reached(self._folder, group, self._lighthouse)

    def _is_lighthouse_lost(self) -> bool:
        found = read_lighthouse(self._folder)
        return found is None or found.address != self._lighthouse

    def _start_quorum(self) -> "_Outcome":
        """Try to form a quorum. torchft would wait for the quorum of a dead lighthouse for ever."""
        ended, lost = threading.Event(), False
        watch = threading.Thread(target=self._watch_lighthouse, args=(ended,), name="lighthouse", daemon=True)
        if self._is_first:
            watch.start()
        try:
            with self._waiting():
                self._manager.start_quorum()
            failed = self._manager.errored() is not None  # a peer died while the quorum connected, or healed this group
        except (RuntimeError, TimeoutError) as err:
            lost, failed = self._is_lighthouse_lost(), True
            if not lost and not isinstance(err, TimeoutError):
                raise
        finally:
            ended.set()
            if self._is_first:
                watch.join()
                lost = lost or self._manager._manager is None
        return _Outcome.LOST if lost else _Outcome.FAILED if failed else _Outcome.MET

    def _watch_lighthouse(self, ended: threading.Event) -> None:
        """End the server of the manager if the lighthouse is lost. The quorum that waits for it fails then."""
        while not ended.wait(_LOOK_S):
            if self._is_lighthouse_lost():
                server, self._manager._manager = self._manager._manager, None
                server.shutdown()
                del server  # its connections close
                return

    def _disconnect(self) -> None:
        """Leave the peers, to meet them again at another lighthouse."""
        if self._manager is None:  # its lighthouse was lost at once
            return
        self._step = self._manager.current_step()
        self._peers.drop(())
        self._manager.shutdown(wait=False)
        self._manager = None

    def reduce(self, gradients: list[torch.Tensor], loss: torch.Tensor) -> bool:
        """Average gradients in place over the groups present. Return True if the step commits here."""
        if not self.has_met:
            raise ScriptInvalid(
                "expected one state.reduce(loss) for each batch, found another one: call it once, after the last backward pass"
            )
        control = self._make_control(loss)
        self._communicator.add(control)
        buckets = list(_buckets(gradients))
        flat = [torch.cat([each.reshape(-1) for each in bucket]) for bucket in buckets]
        works: list[Any] = []
        self.reduced = None
        if not self._reduce_each([*((each, ReduceOp.AVG) for each in flat), (control, ReduceOp.SUM)], works):
            return False
        reduced, executions = self._read_control(control)
        expected = executions[reduced.groups[0]]
        if any(executions[each] != expected for each in reduced.groups):
            self._has_diverged = executions[self.number] != expected
            self._drop(works)
            return False
        if not self._manager.should_commit():
            return False
        for bucket, means in zip(buckets, flat, strict=True):
            start = 0
            for gradient in bucket:
                gradient.copy_(means[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()
        self._awaited, self.reduced = reduced.groups, reduced
        self.execution = _digest(self._peers.meeting)
        return True

    def _make_control(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the message of this rank about the step. Those of all ranks are summed."""
        own, speaks, numbers = self.report(), self.commits and self._is_first, range(self._groups)
        facts = [
            float(loss.detach()),
            *(speaks * each for each in (self.head_step, own.due, own.needed_s)),
            own.notice_age_s,
            *(own.notice == each for each in NOTICES),
            *(number == self.number for number in numbers),
            *((number == self.number and self._is_first) * self.execution for number in numbers),
        ]
        return torch.tensor(facts, dtype=torch.float64)

    def _read_control(self, control: torch.Tensor) -> tuple[Reduced, list[float]]:
        """Return the step, and by group the execution of the step before it."""
        total, head_step, due, needed_s, ages_s, *rest = control.tolist()
        notices, numbers = rest[: len(NOTICES)], rest[len(NOTICES) : len(NOTICES) + self._groups]
        report = RankReport(
            notice=next((name for name, count in zip(NOTICES, notices, strict=True) if count), None),
            notice_age_s=ages_s / max(1.0, sum(notices)),
            due=due > 0,
            needed_s=needed_s,
        )
        groups = tuple(number for number, count in enumerate(numbers) if count)
        reduced = Reduced(loss=total / sum(numbers), report=report, head_step=int(head_step), groups=groups)
        return reduced, rest[len(NOTICES) + self._groups :]

    def part(self) -> bool:
        """Wait for the groups present, which have nothing left to do. Return False if one died, and the rest must meet again."""
        return self._reduce_each([(torch.ones(1), ReduceOp.SUM)], []) and bool(self._manager.should_commit())

    def close(self) -> None:
        """Leave the peers."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)

    def _reduce_each(self, tensors: Iterable[tuple[torch.Tensor, ReduceOp.RedOpType]], works: list[Any]) -> bool:
        """Reduce tensors in place, one after another, and add the works. The quorum is used up.

        Return False if one failed, and drop the step. Gloo closes the connections of a failed reduction only when no other one is
        under way. If two were, group A might wait for group B in reduction 1, and B, where that has failed, for A in reduction 2.
        """
        self.has_met = False
        for tensor, operation in tensors:
            works.append(self._manager.allreduce(tensor, reduce_op=operation))
            with self._waiting():
                works[-1].wait()
            error = self._manager.errored()
            if error is not None:
                # Its frames refer to the reductions, and they to connections.
                error.original_exception.__traceback__ = None
                self._drop(works)
                return False
        return True

    def _drop(self, works: Sequence[Any]) -> None:
        """Drop the step. Peers that wait for this group drop it too, because its connections close."""
        self._peers.drop(works)
        if self._manager.errored() is None:  # the vote of this rank is no
            self._manager.report_error(RuntimeError("the step is dropped"))
        self._manager.should_commit()


def _digest(text: str) -> int:
    """Return a digest that a 64-bit float can hold."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of one type and device, together at most as large as a bucket, or one that is larger."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        fits = size + tensor.nbytes <= _BUCKET_BYTES
        if bucket and not (fits and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
