"""Launch folders: old ones are removed, and none is made without the run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.supervise.ranks import launch_folders
from dlac_pipeline.supervise.ranks.launch_folders import forget_launches, start_local_ranks


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
    monkeypatch.setattr(launch_folders, "KEEP_LAUNCHES", 1)
    count = 4
    spec, nodes = Mock(), Mock(share=Mock(first_rank=0, ranks=0, nodes=count))
    spec.model_dump_json.return_value = "{}"
    (tmp_path / "r").mkdir()
    made = [tmp_path / "r" / f"launch-{number:04}" for number in range(count)]
    for folder in made:
        start_local_ranks(spec, folder, nodes, Mock()).end()
    assert all(folder.is_dir() for folder in made)


def test_attempt_makes_no_missing_run_folder(tmp_path: Path) -> None:
    """After a lost mount the next attempt does not make the run's folder again, where writers would continue."""
    with pytest.raises(StoreUnavailable, match="mount it"):
        start_local_ranks(Mock(), tmp_path / "r" / "launch-abcd", Mock(), Mock())
    assert list(tmp_path.iterdir()) == []
