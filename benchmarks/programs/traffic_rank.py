"""The rank of benchmarks/traffic.py: a replicated model, with replica groups or without, whose last step is in a file."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dlac_pipeline as dlac


def main() -> None:
    """Train to the last step."""
    with dlac.training_run() as run:
        params = run.spec.params
        model = torch.nn.Sequential(
            torch.nn.Linear(64, int(params["hidden"])), torch.nn.Linear(int(params["hidden"]), 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        is_replica = run.spec.launch.replicas > 0
        state = (dlac.TorchFTState if is_replica else dlac.TorchState)(model=model, optimizer=optimizer)
        run.restore(state)
        last_step = Path(params["last_step"]).with_suffix(f".{os.environ['RANK']}")
        for batch in run.batches():
            features = batch["x"].to(torch.float32)
            loss = batch.mean((model(features).squeeze(-1) - features.mean(-1)).square())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            time.sleep(float(params["pause_s"]))
            if isinstance(state, dlac.TorchFTState):
                done = state.reduce(loss)
            else:
                done = True
                gradients = torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])
                dist.all_reduce(gradients)
                gradients /= run.world_size
                start = 0
                for each in model.parameters():
                    each.grad = gradients[start : start + each.numel()].view_as(each)
                    start += each.numel()
            if done:
                optimizer.step()
                last_step.write_text(str(batch.step))
            run.step_done(loss)


if __name__ == "__main__":
    main()
