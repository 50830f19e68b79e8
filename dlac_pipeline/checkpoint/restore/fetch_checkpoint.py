"""Load of the checkpoint of a resume point, on every node of an attempt. The node that claimed has verified it."""

import socket
from pathlib import Path

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.checkpoint.restore.conversion import load_state
from dlac_pipeline.checkpoint.restore.resume_point import FreshStart, FromCheckpoint, ResumePoint
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.rng import load_rng, rng_file, seed_rng
from dlac_pipeline.checkpoint.store import folder_name_of, tiers_of
from dlac_pipeline.lakehouse.errors import ResumeMismatch
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec


def load_checkpoint(
    engine: Engine, point: ResumePoint, spec: JobSpec, tree: RankTree, *, restores: bool
) -> tuple[float, float]:
    """Load the checkpoint of a resume point into an engine, and the random generators of this rank. Collective.

    Without a checkpoint only the generators are seeded. `restores` is true for one rank of every node. Return the seconds until
    the conversion was done, and the seconds of the load. Raise `ResumeMismatch` if another kind of engine saved the checkpoint,
    `StoreUnavailable` or `CheckpointDamaged` if a node has no verified files. Otherwise raises as `load_state`.
    """
    if isinstance(point, FreshStart):
        seed_rng(spec.order.seed, 0, tree.rank // spec.launch.mesh.tp)
        return 0.0, 0.0
    if point.engine != engine.name:
        raise ResumeMismatch(
            f"expected the engine {point.engine!r} that saved checkpoint {point.checkpoint_id!r}, found "
            f"{engine.name!r}: resume with the script that the run was started with"
        )
    folder = Path(point.folder)
    if isinstance(point, FromCheckpoint):
        tiers = tiers_of(spec)
        elsewhere = tiers.store is not None and point.host != socket.gethostname()
        with failing_together(tree, doing=f"fetching the checkpoint {point.checkpoint_id!r}"):
            if elsewhere and restores:
                restore(CheckpointRow(manifest_uri=point.manifest_uri, manifest_digest=point.manifest_digest), tiers)
        if elsewhere:
            folder = tiers.folder(folder_name_of(point.manifest_uri))
    patience_s = spec.launch.start_timeout_s / 4  # the conversion needs time as well
    spent = load_state(
        engine, folder, saved_world_size=point.world_size, tree=tree, converts=restores, patience_s=patience_s
    )
    mesh = spec.launch.mesh
    is_same = (point.world_size, point.mesh) == (tree.world_size, mesh.recorded())
    if is_same and rng_file(folder, tree.rank).exists():
        load_rng(folder, tree.rank)
    else:  # ranks over which tensors are split draw the same numbers
        seed_rng(spec.order.seed, point.step, tree.rank // mesh.tp)
    return spent
