"""Slow ranks: reported once, with the phase in which they are slow."""

import time

from dlac_pipeline.extensions.stragglers.stragglers import Straggler, Stragglers
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, Spent


def signs(step: int, **seconds: list[float]) -> list[RankHeartbeat]:
    """Return heartbeats of ranks at a step. `seconds` are the seconds that each rank has spent in a phase so far."""
    spent = [
        Spent(**{f"{phase}_us": int(each[rank] * 1e6) for phase, each in seconds.items()}, checkpoint_bytes=1)
        for rank in range(len(next(iter(seconds.values()))))
    ]
    return [RankHeartbeat(step, Phase.TRAINING, time.time(), 0, 0.0, each) for each in spent]


def started_detector() -> Stragglers:
    """Return a detector that has observed the start of four ranks."""
    made = Stragglers()
    assert made.observe(signs(0, reading=[0.0] * 4, computing=[0.0] * 4)) == []
    return made


def test_slow_rank_is_named_with_phase() -> None:
    """A rank's own seconds per step are compared with its peers' median, once enough steps are done."""
    detector = started_detector()
    assert detector.observe(signs(4, reading=[0.0] * 4, computing=[2.0, 2.0, 99.0, 2.0])) == []
    (found,) = detector.observe(signs(5, reading=[0.0] * 4, computing=[2.5, 2.5, 15.0, 3.0]))
    assert found == Straggler(rank=2, phase="computing", step=5, own_s=3.0, median_s=0.5)
    assert found.event()["factor"] == 6.0


def test_straggler_is_reported_once() -> None:
    """A rank that is slow, slow, fast and slow is reported the first and the last time."""
    detector, reading, reports = started_detector(), 0.0, []
    for window, more in enumerate((10.0, 10.0, 0.0, 10.0), start=1):
        reading += more
        reports.append(len(detector.observe(signs(5 * window, reading=[0.0, reading, 0.0, 0.0], computing=[1.0] * 4))))
    assert reports == [1, 0, 0, 1]


def test_small_delay_is_not_reported() -> None:
    """No report follows if a rank is less than twice as slow, or loses less than a second per step."""
    assert started_detector().observe(signs(5, computing=[10.0, 10.0, 19.0, 10.0])) == []
    assert started_detector().observe(signs(5, computing=[1.0, 1.0, 5.5, 1.0])) == []
    assert Stragglers().observe(signs(9, computing=[900.0])) == []


def test_loading_and_checkpoints_are_compared() -> None:
    """They are compared once all ranks have done them. Parts of a checkpoint are compared if they have the same size."""
    detector = started_detector()
    assert detector.observe(signs(0, loading=[1.0, 9.0, 0.0, 1.0])) == []
    (found,) = detector.observe(signs(0, loading=[1.0, 9.0, 1.0, 1.0]))
    assert (found.rank, found.phase, found.own_s) == (1, "loading", 9.0)
    (slow,) = detector.observe(signs(3, loading=[1.0, 9.0, 1.0, 1.0], checkpoint=[1.0, 1.0, 1.0, 8.0]))
    assert (slow.rank, slow.phase) == (3, "checkpoint")
    whole = [Spent(checkpoint_us=9_000_000, checkpoint_bytes=10**9), Spent(checkpoint_us=1, checkpoint_bytes=10**3)]
    alone = [RankHeartbeat(5, Phase.TRAINING, time.time(), 0, 0.0, each) for each in whole]
    assert Stragglers().observe(alone) == []


def test_replaced_process_is_no_straggler() -> None:
    """The counts of a process that replaces a dead one begin again, and so does the comparison."""
    detector = started_detector()
    assert detector.observe(signs(5, computing=[50.0] * 4)) == []
    assert detector.observe(signs(10, computing=[100.0, 100.0, 30.0, 100.0])) == []
    assert detector.observe(signs(15, computing=[150.0, 150.0, 80.0, 150.0])) == []
    (found,) = detector.observe(signs(20, computing=[200.0, 200.0, 230.0, 200.0]))
    assert (found.rank, found.own_s) == (2, 30.0)
