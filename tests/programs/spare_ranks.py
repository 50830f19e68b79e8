"""A way of healing by another author: a dead rank is started again in place."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.local_ranks import Exit, RankGroup
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStart


class SpareHealing:
    """Start all ranks together, and a dead one alone."""

    def prepare(self, spec: JobSpec) -> JobSpec:
        """Return the job spec as it is."""
        return spec

    def start(self, start: RankStart) -> "SpareRanks":
        """Begin the start of all ranks."""
        return SpareRanks(start)

    def run_type(self) -> type[Any]:
        """Return the training run of the core."""
        from dlac_pipeline.train.training_run import TrainingRun

        return TrainingRun


class SpareRanks(RankGroup):
    """Ranks that are replaced one by one."""

    def __init__(self, start: RankStart) -> None:
        processes = start.in_background(partial(start.start_ranks, start.share))
        super().__init__(start.folder, processes)
        self._start = start

    def failures(self) -> list[Exit]:
        """Return nothing: the attempt outlives each rank."""
        return []

    def heal(self) -> Iterator[Event]:
        """Start dead ranks again."""
        for dead in super().failures():
            again = replace(self._start.share, first_rank=dead.rank, ranks=1)
            self.processes.start_again(partial(self._start.start_ranks, again))
            yield {"event": "warning", "message": f"rank {dead.rank} was replaced"}
