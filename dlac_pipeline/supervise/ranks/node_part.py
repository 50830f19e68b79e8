"""Part of one node in an attempt: its ranks, and the resume point that they wait for."""

import time
from pathlib import Path

from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.memory_states.node_memory import NodeMemory
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.all_ranks import AllRanks
from dlac_pipeline.supervise.ranks.healing import healing_of
from dlac_pipeline.supervise.ranks.launch_folders import (
    KEEP_LAUNCHES,
    forget_launches,
    make_launch_folder,
    write_resume_point,
    write_spec,
)
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter

_KEPT_WITHIN_S = 10.0
"""Seconds for survivors to notice that a rank is gone, and to keep a state."""
_LOOK_S = 0.005


class NodePart:
    """Part of this node in one attempt, whichever node leads."""

    def __init__(self, spec: JobSpec, round_: Round, nonce: str, *, starter: RankStarter, memory: NodeMemory) -> None:
        """`nonce` names the launch folder."""
        launch = spec.launch.model_copy(update={"world_size": round_.share.world_size})
        self.spec = spec.model_copy(update={"launch": launch})
        """The job spec with the number of ranks that the nodes of the attempt have."""
        self.round = round_
        self.folder = Path(self.spec.checkpoint.local) / self.spec.run / f"launch-{nonce}"
        self.starter = starter
        self.memory = memory
        self.has_point = False
        """True once the ranks of this node have the resume point."""

    def start(self) -> RankGroup:
        """Start this node's ranks with a new launch folder. Raise `StoreUnavailable` if the folder cannot be made."""
        make_launch_folder(self.folder)
        write_spec(self.folder, self.spec)
        forget_launches(self.folder.parent, keep=KEEP_LAUNCHES * self.round.share.nodes)
        return self.starter.start(self.spec, self.folder, self.round.share)

    def all_ranks(self, own: RankGroup) -> AllRanks:
        """Return the ranks of all nodes as the leader sees them, with those that it has started."""
        healing = healing_of(self.spec.launch) if self.round.others else None
        return AllRanks(own, self.round) if healing is None else healing.all_ranks(own, self.round)

    def fetch(self, point: ResumePoint) -> None:
        """Begin to fetch a state in memory. Hand any other resume point to this node's ranks at once."""
        self.memory.begin(point, self.round)
        if not isinstance(point, FromMemory):
            self.has_point = True
            write_resume_point(self.folder, point.to_json())

    def hand_over(self) -> None:
        """Hand a resume point in memory to this node's ranks, once its state is on this node."""
        local = None if self.has_point else self.memory.local_point()
        if local is not None:
            self.has_point = True
            write_resume_point(self.folder, local.to_json())

    def await_last_step(self, ranks: RankGroup) -> None:
        """Wait until a survivor of a rank has kept the state after the last step, if all ranks hold that step."""
        until = time.monotonic() + _KEPT_WITHIN_S
        while self.memory.holds_step() and not ranks.all_exited() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def end(self, ranks: RankGroup) -> None:
        """End the ranks, and the copies of states in memory. Copies end even if the kernel keeps a rank."""
        try:
            ranks.end()
        finally:
            self.memory.end()
