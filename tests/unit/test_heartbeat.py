from __future__ import annotations

from pathlib import Path

import pytest

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file, progress_file
from dlac_pipeline.supervise.liveness.heartbeat import (
    HeartbeatFile,
    Phase,
    Spent,
    read_heartbeat,
    read_heartbeats,
    read_in_hand,
)


def test_all_records_of_launch_are_read(tmp_path: Path) -> None:
    """Records are found by their names. Some ranks have none yet, and a record being fetched from another node counts once."""
    for rank in (1, 3, 100_000):
        HeartbeatFile(tmp_path, rank).write(rank, Phase.TRAINING)
    progress_file(tmp_path, 3).with_suffix(".new").write_bytes(progress_file(tmp_path, 3).read_bytes())
    progress_file(tmp_path, 2).with_suffix(".new").touch()
    progress_file(tmp_path, 4).touch()
    assert [found.step for found in read_heartbeats(tmp_path)] == [1, 3, 100_000]
    assert read_heartbeats(tmp_path / "gone") == []
    assert read_heartbeat(tmp_path, 0) is None


def test_half_written_batch_is_ignored(tmp_path: Path) -> None:
    """Its rank died during the write. Records of the same step from other ranks count, and records of another step do not."""
    batch = [
        "[7, [[0, 1, 0, 2, 30, 38]]]\n",
        "[7, [[0, 2, 0",
        "",
        "[6, [[0, 3, 0, 2, 30, 38]]]\n",
        "[7, [[0, 4, 0, 2, 1, 2]]]\nrest",
    ]
    for rank, text in enumerate(batch):
        in_hand_file(tmp_path, rank).write_text(text)
    assert [moved[1] for moved in read_in_hand(tmp_path, 7)] == [1, 4]


@pytest.mark.parametrize(("in_hand", "doing"), [(8, "computing"), (0, "reading"), (-1, "training")])
def test_last_heartbeat_is_read(tmp_path: Path, in_hand: int, doing: str) -> None:
    """Every number of the last record is read again, and gives the activity during training."""
    writer = HeartbeatFile(tmp_path, 0)
    spent = Spent(in_hand=in_hand, rows=224, reading_us=1, computing_us=2, checkpoint_us=3, loading_us=4, began=1.5)
    writer.write(1, Phase.CHECKPOINT)
    writer.write(7, Phase.TRAINING, loss_step=6, loss=0.25, spent=spent)
    writer.close()
    found = read_heartbeat(tmp_path, 0)
    assert found is not None
    assert (found.step, found.phase, found.loss_step, found.loss) == (7, Phase.TRAINING, 6, 0.25)
    assert (found.spent, found.doing) == (spent, doing)
