"""The rank of benchmarks/training.py: trains a transformer, and records the end of each step before it is reported."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

import dlac_pipeline as dlac


def main() -> None:
    """Train to the end."""
    with dlac.training_run() as run:
        params = run.spec.params
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None else accelerator
        width, layers, tokens = int(params["width"]), int(params["layers"]), int(params["tokens"])
        layer = torch.nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True)
        head = torch.nn.Linear(width, int(params["vocabulary"]))
        body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        embedding = torch.nn.Embedding(int(params["vocabulary"]), width)
        model = torch.nn.Sequential(embedding, body, head).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        stamps: list[float] = []
        positions = torch.arange(tokens, device=device)
        for batch in run.batches(device=device):
            rows = batch["row_id"][:, None] * 31 + positions
            logits = model(rows % int(params["vocabulary"]))
            loss = logits.float().logsumexp(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if accelerator is not None and batch.step % int(params["block"]) == 0:
                torch.accelerator.synchronize()  # otherwise a block would end when the host has launched it
            stamps.append(time.perf_counter())
            if batch.step == int(params["steps"]):
                found = {"stamps_s": stamps, "parameters": sum(parameter.numel() for parameter in model.parameters())}
                Path(params["out"]).write_text(json.dumps(found))
            run.step_done(loss.detach())


if __name__ == "__main__":
    main()
