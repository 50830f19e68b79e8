"""Memory states of a run as the supervisor of a node finds them. Those of several nodes enter through a door."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.elastic.rank_assignment import Member, Share
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import FindStates
from dlac_pipeline.spec.job_spec import JobSpec

_SEVERAL_NODES = Door("dlac.node_memories", "memory of several nodes")


def open_memory(spec: JobSpec, *, name: str) -> "NodeMemory":
    """Return the memory states of a run on this node. `name` distinguishes the run among all runs whose nodes share a secret.

    The entry of `dlac.node_memories` for several nodes is a subclass of `NodeMemory` with its arguments.
    """
    if spec.launch.max_nodes == 1:
        return NodeMemory(spec, name=name)
    found: NodeMemory = _SEVERAL_NODES.load("buddies", setting="launch.nodes")(spec, name=name)
    return found


class NodeMemory:
    """Memory states of a run whose ranks are all on this node."""

    def __init__(self, spec: JobSpec, *, name: str) -> None:
        self.folder = states.memory_folder(spec)
        """Folder of the run's states, or None if this node keeps none."""
        self.launch, self.name = spec.launch, name
        self._point: FromMemory | None = None
        self._attempt: tuple[Path, range] | None = None
        """Folder of the states of the attempt, and its ranks here."""

    def serve(self, address: str, secret: str) -> int:
        """Serve the states at an address of this node. Return the port, or 0 if no other node needs them.

        `secret` is shared by the nodes of the run.
        """
        return 0

    def find(self, round_: Round) -> FindStates:
        """Return a function that finds the whole states of all nodes of a round."""
        return list if self.folder is None else partial(states.read_states, self.folder)

    def begin(self, point: ResumePoint, round_: Round) -> None:
        """Bring the state of a resume point to this node, if it is in memory. Returns at once."""
        self.end()
        self._point = point if isinstance(point, FromMemory) else None
        if self.folder is not None:
            self._attempt = states.attempt_folder(self.folder, point.attempt, point.nonce), ranks_of(round_.share)

    def local_point(self) -> FromMemory | None:
        """Return the resume point in memory for this node's ranks, once its state is here. They fail if it was lost."""
        return self._point

    def holds_step(self) -> bool:
        """Return whether all ranks hold the last step, and none has ended its try to keep the state after it."""
        return self._attempt is not None and states.all_hold(*self._attempt)

    def take_warnings(self) -> Iterator[str]:
        """Yield the warnings since the last call."""
        yield from ()

    def end(self) -> None:
        """End the attempt. The folder of an attempt whose ranks here have kept no state is removed."""
        if self._attempt is not None:
            forget_unkept(*self._attempt)
        self._point, self._attempt = None, None

    def forget(self) -> None:
        """Remove the memory states of the run on this node."""
        if self.folder is not None:
            states.remove(self.folder)

    def close(self) -> None:
        """Stop serving."""


def ranks_of(node: Member | Share) -> range:
    """Return the ranks of a node."""
    return range(node.first_rank, node.first_rank + node.ranks)


def forget_unkept(attempt: Path, ranks: Sequence[int]) -> None:
    """Remove the folder of an attempt whose ranks here have kept no state."""
    parts = states.read_parts(attempt.parent)
    if not any(part.slot.startswith(f"{attempt.name}/") and part.state.rank in ranks for part in parts):
        states.remove(attempt)
        states.remove_if_empty(attempt.parent)
