"""Train a small GPT on a mesh: tensor parallelism, pipeline stages and FSDP2 in one script, as `launch.mesh` says."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import dlac_pipeline as dlac

SPLIT = {"query": ColwiseParallel, "key": ColwiseParallel, "value": ColwiseParallel, "up": ColwiseParallel}
JOINED = {"out": RowwiseParallel, "down": RowwiseParallel}
EMPTY = -100  # target of a slot without a sample


class Block(nn.Module):
    """Causal self-attention and a feed-forward network. A rank of tensor parallelism has some of the heads."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Features [samples, T, width] to features of the same shape."""
        normed = self.norm(features)
        heads = [
            layer(normed).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        features = features + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.feed_norm(features))))
        return features + added


class Gpt(nn.Module):
    """One stage of a GPT. The first one has the embedding, and the last one the output layer."""

    def __init__(self, layers: int, width: int, vocabulary: int, *, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)  # each rank makes the whole model, so that all agree on its first weights
        whole = {str(layer): Block(width, head_width=8) for layer in range(layers)}
        embedding, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.embedding = embedding if stage == 0 else None
        self.blocks = nn.ModuleDict({n: each for n, each in whole.items() if int(n) * stages // layers == stage})
        self.head = head if stage == stages - 1 else None

    def forward(self, entering: Tensor) -> Tensor:
        """Token ids, or the features of the stage before, to features, or to logits of each token."""
        features: Tensor = entering if self.embedding is None else self.embedding(entering)
        for block in self.blocks.values():
            features = block(features)
        return features if self.head is None else self.head(features)


def split(model: Gpt, mesh: DeviceMesh) -> None:
    """Split the layers of a stage over the ranks of tensor parallelism, and shard it over those of data parallelism."""
    for block in model.blocks.values():
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], {name: kind() for name, kind in {**SPLIT, **JOINED}.items()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


class Step:
    """Forward and backward pass of a batch, through the stages of a pipeline if the mesh has several."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self._scale = 0.0
        self._part = PipelineStage(model, stage, stages, torch.device(mesh.device_type), group=mesh["pp"].get_group())
        self._pipeline = Schedule1F1B(self._part, n_microbatches=stages, loss_fn=self._loss_of, scale_grads=False)

    def train(self, values: tuple[Tensor, Tensor] | None, scale: float) -> Tensor | None:
        """Take inputs and targets, or None. Return the sum of losses times `scale`, or None before the last stage."""
        self._scale, losses = scale, list[Tensor]()
        inputs = values[:1] if values and self._part.is_first else ()
        self._pipeline.step(*inputs, target=values[1] if values and self._part.is_last else None, losses=losses)
        return torch.stack(losses).sum().detach() if losses else None

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        summed = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=EMPTY, reduction="sum")
        return summed * self._scale


def values_of(batch: dlac.Batch, vocabulary: int) -> tuple[tuple[Tensor, Tensor] | None, float]:
    """Return inputs and targets, and the factor of their losses as in `batch.mean`. Stages in the middle have no values."""
    if not batch.tensors:
        return None, 0.0
    tokens = batch["tokens"].long() % vocabulary
    counted, whole = batch.valid[:, None], batch.rows * (tokens.shape[1] - 1)
    if "document" in batch.tensors:  # packed documents
        counted, whole = batch["document"][:, 1:] > 0, batch.tokens
    return (tokens[:, :-1], tokens[:, 1:].masked_fill(~counted, EMPTY)), batch.readers / whole


def main() -> None:
    """Train from the committed checkpoint, if there is one, to the end of the run."""
    with dlac.training_run() as run:
        params, mesh = run.spec.params, run.mesh
        layers, width, vocabulary = (int(params.get(name, "32")) for name in ("layers", "width", "vocabulary"))
        model = Gpt(layers, width, vocabulary, stage=mesh["pp"].get_local_rank(), stages=mesh["pp"].size())
        split(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=float(params.get("lr", "3e-3")))
        run.restore(dlac.DistributedState(model=model, optimizer=optimizer))
        step = Step(model, mesh)
        for batch in run.batches(device=mesh.device_type):
            optimizer.zero_grad()
            loss = step.train(*values_of(batch, vocabulary))
            optimizer.step()
            run.step_done(loss)


if __name__ == "__main__":
    main()
