"""The reader state of a checkpoint, from what the ranks voted: nothing is committed where they, or the order, disagree."""

from collections.abc import Sequence

from dlac_pipeline.checkpoint.commit.ledger_rows import Vote
from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.plan.order import LegOrder


def agreed_reader_state(order: LegOrder, votes: Sequence[Vote], step: int) -> list[list[list[int]]]:
    """Return the cursors that the readers reported, by source and key group.

    Where a step determines every cursor, each is compared with it. Ranks that share a key group must agree.

    Raises:
        CursorMismatch: a reader has another cursor, or is at another step.
    """
    state = [[list(c) for c in cursors] for cursors in order.reader_state(step)] if order.counted else None
    reported: dict[int, list[list[int]]] = {}
    for rank, vote in enumerate(votes):
        if vote["step"] != step:
            raise CursorMismatch(f"expected rank {rank} at step {step}, found step {vote['step']}")
        for group, cursors in zip(vote["groups"], vote["cursors"], strict=bool(vote["cursors"])):
            expected = reported.setdefault(group, cursors) if state is None else [each[group] for each in state]
            if cursors != expected:
                raise CursorMismatch(
                    f"expected the cursors of key group {group} at {expected} after step {step}, rank {rank} "
                    f"reported {cursors}: the reader and the order disagree; nothing was committed"
                )
    if state is not None:
        return state
    groups = range(order.settings.key_groups)
    return [[reported[group][source] for group in groups] for source in range(len(order.sources))]
