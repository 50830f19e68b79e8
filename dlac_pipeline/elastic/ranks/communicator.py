"""Communicator of a rank: its place among the ranks, their process group, and the messages that DLAC sends over it."""

from datetime import timedelta

import torch
import torch.distributed as dist

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.step_sync import StepSyncs, Syncs
from dlac_pipeline.elastic.ranks.process_group import join, serve_group_store
from dlac_pipeline.elastic.ranks.this_process import ThisProcess
from dlac_pipeline.read.reader import Exchange, Waits, summing_over

_GROUP_TIMEOUT_S = 86_400.0
"""Seconds that ranks wait for each other: one may convert or fetch a large checkpoint. The supervisor ends hung ranks."""
_BACKGROUND_TAG = 1
"""The tag of messages between the threads that write a checkpoint in the background."""


class Communicator:
    """All ranks of an attempt, as one rank reaches them. Making it joins the process group, and is collective."""

    def __init__(self, process: ThisProcess, waits: Waits, *, hang_timeout_s: float) -> None:
        """`waits` counts the waits of reading for other ranks."""
        self.rank = process.rank
        self.world_size = process.world_size
        self.coordinate, self.speaks, self.mesh = process.coordinate, process.speaks, process.mesh
        self.ranks_with_values = process.ranks_with_values
        local_rank = process.rank if process.local_rank is None else process.local_rank
        self.is_first_of_node = process.world_size == 1 or local_rank == 0
        self.first_rank_here = 0 if process.world_size == 1 else process.rank - local_rank
        self.ranks_here = process.ranks_here or 1
        """Number of ranks on this node, as the launcher says."""
        self.is_launched = process.local_rank is not None
        """True if a launcher has started the ranks of a node together."""
        self.is_on_one_node = self.world_size <= self.ranks_here
        self.waits = waits
        """Waits of reading for other ranks."""
        self._timeout = timedelta(seconds=max(_GROUP_TIMEOUT_S, hang_timeout_s))
        self._group: dist.ProcessGroup | None = None
        if self.world_size == 1:
            serve_group_store()  # DeepSpeed makes a group of one rank
        else:
            join()
            self._group = self._new_group()
        self.tree = RankTree(self.rank, self.world_size, self._group)
        self.background_tree = RankTree(self.rank, self.world_size, self._group, tag=_BACKGROUND_TAG)
        self._apart: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """Groups of exchanges, by their ranks. The reader of another leg uses that of the last one."""
        self.step_syncs: Syncs = StepSyncs(self.world_size, self._group)

    def add(self, numbers: torch.Tensor) -> None:
        """Add the numbers of all ranks, in place. Collective."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)

    def exchange(self, *, counted: bool, joins: bool = True) -> Exchange:
        """Return the exchange of the lengths of batches. Collective, unless they are `counted` beforehand.

        It has a group of its own: a script may read ahead in a thread, and collectives of a group need one order. `joins` is
        false for a rank that does not use it.
        """
        apart = None
        if self._group is not None and not counted:
            joining = torch.zeros(self.world_size, dtype=torch.int32)
            joining[self.rank] = joins
            self.add(joining)
            ranks = joining.nonzero().flatten().tolist()
            apart = self._apart.get(tuple(ranks))
            if apart is None:
                apart = self._apart[tuple(ranks)] = self._new_group(ranks)
        return summing_over(apart, self.waits, counts_here=self.speaks)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _new_group(self, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Make a group of these ranks, or of all, for messages between CPUs. Collective over all."""
        group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=self._timeout)
        return group
