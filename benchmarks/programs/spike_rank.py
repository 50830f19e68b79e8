"""The rank of benchmarks/spike.py, in plain PyTorch: a small GPT over bytes, or a regression of a number on them."""

import torch
import torch.distributed as dist

import dlac_pipeline as dlac
from examples.gpt.model import Gpt, GptConfig


class Regression(torch.nn.Module):
    """The mean of embedded bytes, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.EmbeddingBag(256, 32)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def forward(self, batch: dlac.Batch) -> torch.Tensor:
        """Return the squared error of each sample."""
        errors: torch.Tensor = self.layers(self.embed(batch["tokens"]))[:, 0] - batch["blanks"]
        return errors.square()


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        params = run.spec.params
        model = Regression() if params["kind"] == "planted" else Gpt(GptConfig.from_params(params))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        for batch in run.batches():
            loss = batch.mean(model(batch if isinstance(model, Regression) else batch["tokens"]))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(run.world_size)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.step_done(loss)


if __name__ == "__main__":
    main()
