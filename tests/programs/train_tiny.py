"""A tiny model trained on a table of (row_id, x): plain PyTorch, gradients averaged by hand, and a journal of its own.

The journal holds the row ids that were in the tensors of each finished step: evidence that is not DLAC's.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dlac_pipeline as dlac


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        journal = Path(run.spec.params["journal"]) / f"{run.resume_point.nonce}-{run.rank}.jsonl"
        pause_s = float(run.spec.params.get("pause_s", "0"))
        for batch in run.batches():
            features = batch["x"].to(torch.float32)
            per_sample = ((model(features).squeeze(-1) - features.sum(-1)) ** 2) + 0.01 * torch.rand(len(features))
            loss = batch.mean(per_sample)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                if run.world_size > 1:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= run.world_size
            time.sleep(pause_s)
            optimizer.step()
            with journal.open("a") as stream:
                ids = batch["row_id"][batch.valid].tolist()
                stream.write(json.dumps({"attempt": run.resume_point.attempt, "step": batch.step, "rows": ids}) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            run.step_done(loss)


if __name__ == "__main__":
    main()
