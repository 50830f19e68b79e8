"""One rank's Checkpoint Manager, put together: the job spec and where the attempt resumes in, the manager out."""

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.commit.coordinator import Committer
from dlac_pipeline.checkpoint.commit.ledger_rows import AttemptLeg
from dlac_pipeline.checkpoint.commit.local_copies import LocalCopies
from dlac_pipeline.checkpoint.manager import CheckpointManager
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.checkpoint.training_config import config_digest
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec


def open_manager(
    spec: JobSpec,
    trained: AttemptLeg,
    *,
    lakehouse: Lakehouse,
    tiers: Tiers,
    tree: RankTree,
    background_tree: RankTree,
    evicts: bool,
) -> CheckpointManager:
    """Return the manager of this rank's part of an attempt's checkpoints, by the job spec.

    `background_tree` is a tree apart from `tree`, for commits in the background. One rank of a node `evicts` its local copies.
    """
    settings = spec.checkpoint
    committer = Committer(
        trained, lakehouse=lakehouse, settings=settings, config_digest=config_digest(spec), tiers=tiers
    )
    copies = LocalCopies(
        tiers,
        keep=min(settings.local_keep, settings.keep_last or settings.local_keep),
        evicts=evicts,
        resumed_from=trained.parent_folder,
    )
    return CheckpointManager(
        attempt=trained.attempt,
        head=trained.parent,
        committer=committer,
        tree=tree,
        background_tree=background_tree,
        tiers=tiers,
        copies=copies,
    )
