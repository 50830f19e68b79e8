"""Messages between ranks: notices, requests and losses reach every rank at the same step, over a tree."""

import pytest
import torch.distributed as dist

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.step_sync import MAX_STEPS, RankReport, StepSync, StepSyncs
from dlac_pipeline.lakehouse.errors import CursorMismatch

QUIET = RankReport()


def messages_of(syncs: StepSyncs, steps: int, *, stop_at: int = 0) -> list[tuple[int, StepSync]]:
    """Return (step of its arrival, message) for ranks whose loss is the step's number."""
    received = []
    for step in range(1, steps + 1):
        report = RankReport(notice="SIGTERM", notice_age_s=1.5) if 0 < stop_at <= step else QUIET
        sync = syncs.step_done(step, loss=float(step), report=report)
        if sync is not None:
            received.append((step, sync))
    return received + [(steps, sync) for sync in syncs.flush()]


def test_every_loss_arrives_once_in_order() -> None:
    """A message may cover several steps. Together the messages cover each step exactly once."""
    received = messages_of(StepSyncs(1, None), 100)
    assert [loss for _, sync in received for loss in sync.losses] == [float(step) for step in range(1, 101)]
    assert all(sync.step == sync.losses[-1] for _, sync in received)


def test_fast_steps_share_message_with_notice() -> None:
    """Messages cover at most MAX_STEPS of the fast steps. A notice arrives one step after its message is sent."""
    received = messages_of(StepSyncs(1, None), 300, stop_at=50)
    assert max(len(sync.losses) for _, sync in received) == MAX_STEPS
    first, sync = next((step, sync) for step, sync in received if sync.notice)
    assert 50 < first <= 50 + MAX_STEPS + 1
    assert (sync.notice, sync.notice_age_s) == ("SIGTERM", 1.5)


def test_rank_0_request_is_in_its_step() -> None:
    """A due checkpoint, its duration and a rescale are sent with the losses, and are not in the next message."""
    syncs = StepSyncs(1, None)
    syncs.step_done(1, loss=0.5, report=RankReport(due=True, needed_s=2.5, makes_room=True))
    assert syncs.step_done(2, loss=0.5, report=QUIET) == StepSync(
        step=1, losses=[0.5], due=True, needed_s=2.5, makes_room=True
    )
    assert syncs.flush() == [StepSync(step=2, losses=[0.5])]


def test_different_steps_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that skipped a batch would train on other rows than the ledger records, so it is an error."""

    def add_late_rank(message: object, **_: object) -> None:
        message[0] += 4  # type: ignore[index]  # the tensor of the message

    monkeypatch.setattr(dist, "all_reduce", add_late_rank)
    syncs = StepSyncs(2, None)
    syncs.step_done(5, loss=0.0, report=QUIET)
    with pytest.raises(CursorMismatch, match="expected all 2 ranks at step 5"):
        syncs.flush()


@pytest.mark.parametrize("world_size", range(1, 65))
def test_tree_reaches_every_rank_once(world_size: int) -> None:
    """Every rank but the root is a child of exactly the rank that it names as parent, at most log2(n) levels down."""
    trees = [RankTree(rank, world_size, None) for rank in range(world_size)]
    parents = {child: tree.rank for tree in trees for child in tree.children}
    assert sum(len(tree.children) for tree in trees) == world_size - 1
    assert parents == {rank: trees[rank].parent for rank in range(1, world_size)}
    for rank in range(world_size):
        depth, at = 0, rank
        while at:
            at, depth = parents[at], depth + 1
        assert depth <= (world_size - 1).bit_length()
        assert len(trees[rank].children) <= (world_size - 1).bit_length()
