"""Loss spikes: what counts as one, where it begins, and which samples are to blame."""

import math
import random

import pytest

from dlac_pipeline.extensions.replay.loss_spikes import WINDOW, LossWindow, count_to_blame, find_spikes

NAN = math.nan


def curve(steps: int, **spikes: float) -> dict[int, float]:
    """Return a noisy falling loss by step. `spikes` are losses by step, such as s40."""
    noise = random.Random(0)
    losses = {step: 2 + 3 / step + noise.gauss(0, 0.05) for step in range(1, steps + 1)}
    return losses | {int(name[1:]): loss for name, loss in spikes.items()}


def test_spikes_stand_out_of_noise() -> None:
    """A falling and noisy loss has no spike, and single jumps are found with the median before them."""
    assert find_spikes(curve(400)) == []
    first, second = find_spikes(curve(400, s40=5.0, s200=8.0))
    assert (first.step, first.last_step, first.loss) == (40, 40, 5.0)
    assert (second.step, second.peak) == (200, 8.0)
    assert second.before == pytest.approx(2.02, abs=0.03)
    assert second.rise > first.rise


def test_consecutive_spikes_are_one() -> None:
    """The first step of high losses begins the spike, and a loss that stays high becomes normal."""
    losses = curve(60) | {step: 5.0 + (step == 62) for step in range(61, 200)}
    [spike] = find_spikes(losses)
    assert (spike.step, spike.loss, spike.peak) == (61, 5.0, 6.0)
    assert 61 + WINDOW // 2 - 2 <= spike.last_step <= 61 + WINDOW // 2 + 2
    [skipped] = find_spikes({step: loss for step, loss in losses.items() if step != 62})
    assert skipped.step == 61


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf])
def test_nonfinite_losses_are_spikes(loss: float) -> None:
    """NaN and infinity are spikes at any step. They do not become the measure of the steps after them."""
    first, second = find_spikes(curve(100, s3=loss, s80=loss, s81=4.0))
    assert (first.step, second.step, second.last_step) == (3, 80, 81)
    assert second.rise == math.inf


def test_flat_loss_has_floor() -> None:
    """A constant loss lets 6 % pass, and the first ten losses have nothing to be compared with."""
    flat = dict.fromkeys(range(1, 30), 1.0)
    assert find_spikes(flat | {30: 1.05, 31: 1.0}) == []
    assert [each.step for each in find_spikes(flat | {9: 50.0, 30: 1.07})] == [30]


def test_window_forgets_old_losses() -> None:
    """Only the last losses count, however a window was filled: by steps one at a time, or by a ledger."""
    losses = curve(500, s7=100.0)
    late = {step: loss for step, loss in losses.items() if step > 500 - WINDOW}
    assert LossWindow(losses).limit == LossWindow(late).limit
    assert LossWindow({}).limit == math.inf


def test_few_samples_are_blamed() -> None:
    """The samples without which the mean is no spike: by items, all of NaN, and none if it would be most of them."""
    assert count_to_blame([(90.0, 1), (3.0, 1), *[(1.0, 1)] * 6], 4.0) == 1
    assert count_to_blame([(90.0, 1), (60.0, 1), *[(1.0, 1)] * 6], 4.0) == 2
    assert count_to_blame([(90.0, 1), (3.0, 1), (1.0, 500)], 4.0) == 0
    assert count_to_blame([(NAN, 1), (NAN, 2), *[(1.0, 1)] * 6], math.inf) == 2
    assert count_to_blame([(9.0, 1)] * 8, 4.0) == 0
