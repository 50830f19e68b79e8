"""Launch folders: old ones are removed, and none is made without the run's folder."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.supervise.ranks import node_part
from dlac_pipeline.supervise.ranks.launch_folders import forget_launches
from dlac_pipeline.supervise.ranks.node_part import NodePart
from tests.small_records import small_spec


def test_oldest_launch_folders_are_removed(tmp_path: Path) -> None:
    """The newest launch folders and other folders stay. The rest is removed in portions, oldest first."""
    for number in range(12):
        folder = tmp_path / f"launch-{number:02}"
        folder.mkdir()
        (folder / "spec.json").touch()
        os.utime(folder, (number, number))
    (tmp_path / "attempt-0001").mkdir()
    left = []
    for _ in range(3):
        forget_launches(tmp_path, keep=3)
        left.append(sorted(path.name for path in tmp_path.glob("launch-*")))
    assert left[0] == [f"launch-{number:02}" for number in range(5, 12)]
    assert left[1] == left[2] == ["launch-09", "launch-10", "launch-11"]
    assert (tmp_path / "attempt-0001").is_dir()


def test_nodes_keep_each_others_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of every node of an attempt is kept, whatever the number of nodes."""
    monkeypatch.setattr(node_part, "KEEP_LAUNCHES", 1)
    parts = [_part(tmp_path, nonce=f"{number:04}", nodes=4) for number in range(4)]
    parts[0].folder.parent.mkdir()
    for part in parts:
        part.start().end()
    assert all(part.folder.is_dir() for part in parts)


def test_attempt_makes_no_missing_run_folder(tmp_path: Path) -> None:
    """After a lost mount the next attempt does not make the run's folder again, where writers would continue."""
    with pytest.raises(StoreUnavailable, match="mount it"):
        _part(tmp_path, nonce="abcd", nodes=1).start()
    assert list(tmp_path.iterdir()) == []


def _part(folder: Path, *, nonce: str, nodes: int) -> NodePart:
    """Return a node's part in an attempt of run "r", without ranks."""
    spec, share = small_spec(checkpoint={"local": str(folder)}), Share(world_size=nodes, ranks=1, nodes=nodes)
    return NodePart(spec, Mock(share=share), nonce, starter=Mock(), memory=Mock())
