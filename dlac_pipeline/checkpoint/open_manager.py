"""One rank's Checkpoint Manager, put together: the job spec and where the attempt resumes in, the manager out."""

from __future__ import annotations

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.commit.coordinator import Committer
from dlac_pipeline.checkpoint.commit.local_copies import LocalCopies
from dlac_pipeline.checkpoint.manager import CheckpointManager
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.checkpoint.training_config import config_digest
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import Attempt
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.spec.job_spec import JobSpec


def open_manager(
    spec: JobSpec,
    *,
    attempt: Attempt,
    leg: Leg,
    leg_is_new: bool,
    order: LegOrder,
    head: str | None,
    resumed_from: str | None,
    lakehouse: Lakehouse,
    tiers: Tiers,
    tree: RankTree,
    behind: RankTree,
    evicts: bool,
) -> CheckpointManager:
    """Return the manager of this rank's part of an attempt's checkpoints, by the job spec.

    `order` is used here only. `head` is the id of the checkpoint that the attempt resumes from, `resumed_from` its name in
    the store. `behind` is a tree apart from `tree`, for commits in the background. One rank of a node `evicts` its local
    copies.
    """
    settings = spec.checkpoint
    committer = Committer(
        attempt=attempt,
        settings=settings,
        config_digest=config_digest(spec),
        order=order,
        leg=leg,
        leg_is_new=leg_is_new,
        parent=head,
        lakehouse=lakehouse,
        tiers=tiers,
    )
    copies = LocalCopies(
        tiers,
        keep=min(settings.local_keep, settings.keep_last or settings.local_keep),
        evicts=evicts,
        resumed_from=resumed_from,
    )
    return CheckpointManager(
        attempt=attempt, head=head, committer=committer, tree=tree, behind=behind, tiers=tiers, copies=copies
    )
