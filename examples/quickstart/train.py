"""Train a network in plain PyTorch. Each row is consumed exactly once, even if this process is killed."""

import torch

import dlac_pipeline as dlac

FEATURES = ["x"]
TARGET = "y"  # predicted from the features


def stack(batch, names):
    """Return columns as one tensor [samples, columns]. asinh keeps large numbers small. Null and NaN become 0."""
    return torch.stack([torch.asinh(batch[name].double().nan_to_num()).float() for name in names], dim=1)


with dlac.training_run() as run:
    # Your own model and optimizer go here.
    model = torch.nn.Sequential(torch.nn.Linear(len(FEATURES), 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    run.restore(dlac.TorchState(model=model, optimizer=optimizer))  # the last committed checkpoint, if one exists
    for batch in run.batches():  # one batch per optimizer step, past the last committed row
        # Your own loss goes here, one number per sample. batch["NAME"] is the tensor of a column.
        errors = model(stack(batch, FEATURES)) - stack(batch, [TARGET])
        loss = batch.mean(errors.square()[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_done(loss)  # records the rows of this step
