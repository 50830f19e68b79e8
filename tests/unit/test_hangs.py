"""Detection of a hung rank, and of a live launch by its lock."""

from __future__ import annotations

import pytest

from dlac_pipeline.elastic.ranks.watched_time import WatchedTime
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.failure import HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat
from dlac_pipeline.supervise.ranks.local_ranks import Exit

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
