"""Heartbeats of ranks: their records, hung ranks and slow ones."""

from pathlib import Path

import pytest

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file, progress_file
from dlac_pipeline.elastic.ranks.watched_time import WatchedTime
from dlac_pipeline.extensions.poison.poison_rows import read_in_hand
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.failure import HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import (
    HeartbeatFile,
    Phase,
    RankHeartbeat,
    Spent,
    read_heartbeat,
    read_heartbeats,
)
from dlac_pipeline.supervise.ranks.local_ranks import Exit


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
    batch = ["[7, [[0, 1, 0, 2, 30, 38]]]\n", "[7, [[0, 2, 0", "", "[6, [[0, 3, 0, 2, 30, 38]]]\n"]
    batch.append("[7, [[0, 4, 0, 2, 1, 2]]]\nrest")
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


LAUNCH = LaunchSpec.model_validate({"script": "x", "hang_timeout_s": 10.0})


LOOKED_S = 60.0
"""Duration of the watch."""


class Ranks:
    """Ranks with heartbeats of a given age at the end, or None without one. Their wall clocks run `pace` times too fast."""

    def __init__(self, *signs: tuple[Phase, float] | None, pace: float = 1.0) -> None:
        self._signs = signs
        self._pace = pace
        self.now = 0.0

    def heartbeats(self) -> list[RankHeartbeat | None]:
        """Return the heartbeats as a group of ranks does. Their losses are no numbers."""
        return [sign and RankHeartbeat(7, sign[0], self._written_at(sign[1]), 7, float("nan")) for sign in self._signs]

    def _written_at(self, silent_s: float) -> float:
        return 1e9 + self._pace * min(self.now, LOOKED_S - silent_s)


def silent_after(ranks: Ranks, looked_s: float) -> Exit | None:
    """Return the hang that a supervisor finds after a watch of that length, at ten polls a second."""
    silence = HangDetector(LAUNCH, WatchedTime(lambda: ranks.now))
    blamed = None
    for tenth in range(int(looked_s * 10) + 1):
        ranks.now = tenth / 10
        blamed = silence.find_hang(ranks.heartbeats())
    return blamed


@pytest.mark.parametrize("pace", [1.0, 1000.0, -1000.0])
@pytest.mark.parametrize(
    ("signs", "blamed"),
    [
        ([(Phase.TRAINING, 1.0), (Phase.TRAINING, 11.0), (Phase.CHECKPOINT, 12.0)], 2),
        ([(Phase.TRAINING, 1.0), (Phase.TRAINING, 9.0)], None),
        ([(Phase.TRAINING, 50.0), (Phase.LOADING, 50.0)], None),
        ([(Phase.DONE, 5000.0), (Phase.DONE, 5000.0)], None),
        ([(Phase.DONE, 5000.0), (Phase.CHECKPOINT, 9.0)], None),
        ([(Phase.DONE, 5000.0), (Phase.CHECKPOINT, 11.0)], 1),
    ],
)
def test_silent_rank_with_work_hangs(signs: list[tuple[Phase, float] | None], blamed: int | None, pace: float) -> None:
    """A script may work without heartbeats after its last step, in an evaluation for example. Clocks may be wrong."""
    silent = silent_after(Ranks(*signs, pace=pace), LOOKED_S)
    assert (None if silent is None else silent.rank) == blamed


def test_early_silent_rank_is_found() -> None:
    """The silence begins with the first poll. Of several hung ranks the one with the oldest heartbeat by its clock is blamed."""
    signs = [(Phase.TRAINING, 400.0), (Phase.TRAINING, 500.0), (Phase.TRAINING, 55.0)]
    assert silent_after(Ranks(*signs), 10.0) is None
    silent = silent_after(Ranks(*signs), 10.1)
    assert silent is not None
    assert (silent.rank, silent.message) == (1, "no heartbeat for 10 s, last while training")
    silent = silent_after(Ranks(None, None), 600.1)
    assert silent is not None
    assert silent.message == "no heartbeat for 600 s, last while starting"


def test_suspended_supervisor_reads_ranks_first() -> None:
    """Suspended time is no silence. Ranks that do not resume with the supervisor are found after the usual time."""
    ranks = Ranks((Phase.TRAINING, LOOKED_S), (Phase.TRAINING, LOOKED_S))
    silence = HangDetector(LAUNCH, WatchedTime(lambda: ranks.now))
    moments = [0.0, 1.0, *(700 + tenth / 10 for tenth in range(200))]
    blamed = []
    for ranks.now in moments:
        blamed.append(silence.find_hang(ranks.heartbeats()))
    first = next(moment for moment, exit_ in zip(moments, blamed, strict=True) if exit_ is not None)
    assert 708 < first < 709.5
