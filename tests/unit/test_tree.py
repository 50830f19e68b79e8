from __future__ import annotations

import pytest

from dlac_pipeline.checkpoint.collectives import RankTree


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


def test_single_rank_needs_no_group() -> None:
    """A gather and a broadcast of one rank need no process group."""
    tree = RankTree(0, 1, None)
    assert tree.gather(b"vote") == [b"vote"]
    assert tree.broadcast(b"decision") == b"decision"
    assert tree.lowest(b"failure") == b"failure"
