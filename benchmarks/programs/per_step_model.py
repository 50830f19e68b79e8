"""The model of both sides of benchmarks/per_step.py, and its loss for each sample."""

import torch

WIDTH = 256
FORWARD_S = 0.02
"""Seconds that stand for the computation of an accelerator. They do not depend on the load of the processor."""


def make(rate: float = 0.001) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, equal in all groups: 0.5 MB of state, with that of the optimizer.

    `rate` is the learning rate. At the default one, training does not amplify rounding: see benchmarks/rounding.py.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def losses(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row. A part of the target cannot be learned, so the loss does not vanish."""
    prediction: torch.Tensor = model(x).squeeze(-1)
    return (prediction - x.sum(-1) - torch.sin(1e4 * x[:, 0])) ** 2
