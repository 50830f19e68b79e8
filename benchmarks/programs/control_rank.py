"""The rank of the training that commits the checkpoint for the recoveries of benchmarks/control_plane.py."""

import torch

import dlac_pipeline as dlac


def main() -> None:
    """Train until a signal ends it."""
    with dlac.training_run() as run:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.restore(model=model, optimizer=optimizer)
        for batch in run.batches():
            features = batch["x"].to(torch.float32).unsqueeze(-1)
            loss = batch.mean((model(features).squeeze(-1) - 1.0) ** 2)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            run.step_done(loss)


if __name__ == "__main__":
    main()
