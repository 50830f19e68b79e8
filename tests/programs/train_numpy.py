"""A tiny model whose learning rate NumPy computes, so that the optimizer's state has NumPy scalars. It dies once at `dies_at`.

With param `schedule` the optimizer also has a NumPy array.
"""

import os

import numpy as np
import torch

import dlac_pipeline as dlac


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        params = run.spec.params
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        (group,) = optimizer.param_groups
        if "schedule" in params:
            group["schedule"] = np.linspace(0.01, 0.0, 8)
        run.restore(model=model, optimizer=optimizer)
        for batch in run.batches():
            if batch.step == int(params.get("dies_at", "0")) and run.resume_point.attempt == 1:
                os._exit(1)
            group["lr"] = 0.01 * 0.5 * (1 + np.cos(np.pi * batch.step / 100))
            features = batch["x"].to(torch.float32)
            loss = batch.mean((model(features).squeeze(-1) - features.sum(-1)) ** 2)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            run.step_done(loss)


if __name__ == "__main__":
    main()
