"""Whether a training amplifies rounding, and whether its losses show a wrong weight: `python -m benchmarks.rounding`.

The model of `benchmarks.per_step` trains in one process, 8,333 steps of 64 rows. The gradients of a batch are the mean over the
shares of four groups. The same training has three groups in some steps, as after deaths, and so rounds its sums otherwise. In
another one the gradients of one step are also too large by a third, as if a share had the weight of another number of groups.
"""

import os
import random
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import Figure, report

STEPS = 8_333
BATCH = 64
_DEATHS, _ABSENT_STEPS = 108, 25
_WRONG_STEP = 4_000
_RATES = (0.01, 0.001)


def main() -> None:
    """Compare the trainings at both learning rates, and report."""
    sys.path.insert(0, str(Path(__file__).parent / "programs"))
    torch.set_num_threads(1)
    draw = random.Random(1)
    deaths = [draw.randrange(STEPS) for _ in range(_DEATHS)]
    absent = {step for death in deaths for step in range(death, death + _ABSENT_STEPS)}
    figures = {
        "steps": Figure(value=STEPS, unit="steps"),
        "steps_of_three_groups": Figure(value=sum(step in absent for step in range(STEPS)), unit="steps"),
    }
    for rate in _RATES:
        calm, changing = train(rate), train(rate, absent=absent)
        figures[f"difference_at_{rate}"] = Figure(value=1e6 * difference(calm, changing), unit="ppm")
    wrong = train(_RATES[-1], absent=absent, wrong={_WRONG_STEP})
    figures[f"wrong_weight_at_{_RATES[-1]}"] = Figure(value=1e6 * difference(calm, wrong), unit="ppm")
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("rounding", figures)


def train(rate: float, *, absent: Collection[int] = (), wrong: Collection[int] = ()) -> list[float]:
    """Return the losses of all steps: of three groups in the absent ones, of gradients that are too large in the wrong ones."""
    from per_step_model import losses, make  # type: ignore[import-not-found]  # main puts its folder on the path

    model, optimizer = make(rate)
    rows = np.random.default_rng(3).permutation(STEPS * BATCH)
    found = []
    for step in range(STEPS):
        ids = rows[step * BATCH : (step + 1) * BATCH]
        x = torch.from_numpy(np.sin(ids[:, None] * np.array([1.0, 2.0, 3.0, 4.0])).astype(np.float32))
        groups = 3 if step in absent else 4
        total, sums = 0.0, [torch.zeros_like(each) for each in model.parameters()]
        for share in x.tensor_split(groups):
            optimizer.zero_grad()
            loss = losses(model, share).sum() * (groups / BATCH)
            loss.backward()
            total += float(loss.detach())
            sums = [before + each.grad for before, each in zip(sums, model.parameters(), strict=True)]
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient / groups * (4 / 3 if step in wrong else 1.0)
        optimizer.step()
        found.append(total / groups)
    return found


def difference(ones: list[float], others: list[float]) -> float:
    """Return the largest relative difference of two losses of one step."""
    return max(abs(one - other) / abs(one) for one, other in zip(ones, others, strict=True))


if __name__ == "__main__":
    main()
