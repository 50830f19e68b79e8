from __future__ import annotations

import time

from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, Spent
from dlac_pipeline.supervise.policies.stragglers import Straggler, Stragglers

STEPS = 5


def signs(step: int, **seconds: list[float]) -> list[RankHeartbeat]:
    """Signs of life of ranks at a step; `seconds` are what each has spent in a phase until then."""
    ranks = len(next(iter(seconds.values())))
    spent = [
        Spent(**{f"{phase}_us": int(each[rank] * 1e6) for phase, each in seconds.items()}, checkpoint_bytes=1)
        for rank in range(ranks)
    ]
    return [RankHeartbeat(step, Phase.TRAINING, time.time(), 0, 0.0, each) for each in spent]


def watched(**settings: float) -> Stragglers:
    """A watch that has seen four ranks begin."""
    made = Stragglers(LaunchSpec.model_validate({"script": "x", "straggler_steps": STEPS, **settings}))
    assert made.observe(signs(0, reading=[0.0] * 4, computing=[0.0] * 4)) == []
    return made


def test_slow_rank_is_named_with_phase() -> None:
    """Its own seconds per step against the median of the others; nothing is said before so many steps are done."""
    watch = watched()
    assert watch.observe(signs(4, reading=[0.0] * 4, computing=[2.0, 2.0, 99.0, 2.0])) == []
    (found,) = watch.observe(signs(5, reading=[0.0] * 4, computing=[2.5, 2.5, 15.0, 3.0]))
    assert found == Straggler(rank=2, phase="computing", step=5, own_s=3.0, median_s=0.5)
    assert found.event()["factor"] == 6.0


def test_straggler_is_reported_once() -> None:
    """Slow, slow, fast, slow: told the first and the last time."""
    watch, reading, told = watched(), 0.0, []
    for window, more in enumerate((10.0, 10.0, 0.0, 10.0), start=1):
        reading += more
        told.append(len(watch.observe(signs(5 * window, reading=[0.0, reading, 0.0, 0.0], computing=[1.0] * 4))))
    assert told == [1, 0, 0, 1]


def test_less_than_the_setting_is_nothing_to_tell() -> None:
    """Neither a rank that is less than twice as slow, nor one that loses less than a second per step, nor with the watch off."""
    assert watched().observe(signs(5, computing=[10.0, 10.0, 19.0, 10.0])) == []
    assert watched().observe(signs(5, computing=[1.0, 1.0, 5.5, 1.0])) == []
    assert watched(straggler_factor=0.0).observe(signs(5, computing=[1.0, 1.0, 99.0, 1.0])) == []
    assert watched(straggler_s=0.5).observe(signs(5, computing=[1.0, 1.0, 5.5, 1.0])) != []


def test_loading_and_checkpoints_are_compared_each_time() -> None:
    """As soon as all ranks have done it; a part of a checkpoint only with parts that are as large."""
    watch = watched()
    assert watch.observe(signs(0, loading=[1.0, 9.0, 0.0, 1.0])) == []
    (found,) = watch.observe(signs(0, loading=[1.0, 9.0, 1.0, 1.0]))
    assert (found.rank, found.phase, found.own_s) == (1, "loading", 9.0)
    (slow,) = watch.observe(signs(3, loading=[1.0, 9.0, 1.0, 1.0], checkpoint=[1.0, 1.0, 1.0, 8.0]))
    assert (slow.rank, slow.phase) == (3, "checkpoint")
    whole = [Spent(checkpoint_us=9_000_000, checkpoint_bytes=10**9), Spent(checkpoint_us=1, checkpoint_bytes=10**3)]
    alone = [RankHeartbeat(5, Phase.TRAINING, time.time(), 0, 0.0, each) for each in whole]
    assert Stragglers(LaunchSpec(script="x")).observe(alone) == []


def test_one_rank_alone_is_never_slow() -> None:
    """There is nobody to compare it with."""
    watch = Stragglers(LaunchSpec(script="x", straggler_steps=1))
    assert watch.observe(signs(0, computing=[0.0])) == []
    assert watch.observe(signs(9, computing=[900.0])) == []
