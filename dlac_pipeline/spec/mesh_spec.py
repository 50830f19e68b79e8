"""The mesh section of a job spec: how many ranks have one replica of the model, and how ranks are numbered."""

from pydantic import Field

from dlac_pipeline.spec.bounds import MOST_NODES
from dlac_pipeline.spec.spec_problems import Section


class MeshSpec(Section):
    """Parallelism within a replica of the model. What is left of the world size is data parallelism.

    Ranks are numbered as torchtitan's ParallelDims numbers them: `pp` outermost, then data parallelism, `cp`, and `tp` innermost.
    Ranks that differ in `pp`, `cp` or `tp` only read the same share of the batch.
    """

    tp: int = Field(default=1, ge=1, le=MOST_NODES)
    """Ranks over which tensors are split. They are on one node."""
    pp: int = Field(default=1, ge=1, le=MOST_NODES)
    """Stages of a pipeline. Ranks of all stages but the last one may call `run.step_done(None)`."""
    cp: int = Field(default=1, ge=1, le=MOST_NODES)
    """Ranks over which sequences are split. Each has whole sequences, and the script splits them."""
    ep: int = Field(default=1, ge=1, le=MOST_NODES)
    """Ranks over which experts are split, among those of one stage. It divides their number."""

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that have one replica of the model, and read one share of the batch."""
        return self.pp * self.cp * self.tp

    def recorded(self) -> dict[str, int]:
        """Return the dimensions as states have them: none if a replica has one rank."""
        return self.model_dump() if self.replica_ranks > 1 else {}

    def readers(self, world_size: int) -> int:
        """Return the number of shares of the batch: the size of data parallelism."""
        return world_size // self.replica_ranks

    def divides(self, world_size: int) -> bool:
        """Return whether so many ranks are whole replicas, over which experts can be split."""
        return world_size % self.replica_ranks == 0 and world_size // self.pp % self.ep == 0

    def coordinates(self, rank: int, world_size: int) -> dict[str, int]:
        """Return the coordinate of a rank in each dimension."""
        stage, rest = divmod(rank, world_size // self.pp)
        rest, tp = divmod(rest, self.tp)
        dp, cp = divmod(rest, self.cp)
        return {"pp": stage, "dp": dp, "cp": cp, "tp": tp}

    def is_last_stage(self, rank: int, world_size: int) -> bool:
        """Return whether a rank has the last stage of the pipeline, and so the loss."""
        return rank >= world_size - world_size // self.pp

    def is_middle_stage(self, rank: int, world_size: int) -> bool:
        """Return whether a rank has neither the first nor the last stage of the pipeline."""
        return 0 < self.coordinates(rank, world_size)["pp"] < self.pp - 1

    def is_first_of_stage(self, rank: int, world_size: int) -> bool:
        """Return whether a rank is the first of its share in its stage."""
        place = self.coordinates(rank, world_size)
        return not place["cp"] and not place["tp"]

    def speaks(self, rank: int, world_size: int) -> bool:
        """Return whether a rank is the first of its share. It alone reports what they read."""
        return self.is_first_of_stage(rank, world_size) and rank < world_size // self.pp


DATA_PARALLEL = MeshSpec()
"""The mesh of replicas of a rank each."""
