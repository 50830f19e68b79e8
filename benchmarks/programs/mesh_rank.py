"""The rank of benchmarks/mesh.py: a small GPT split by tensors, stages and sequences, with a log of the rows of each step.

Sequences are split over the ranks of cp, which attend to the keys of all of them. Each token predicts itself, so that batches of
samples and packed documents have the same form. Each token of a row has the number of that row.
"""

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import dlac_pipeline as dlac
from dlac_pipeline.read.blocks import BlockDecoder

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.mesh.train import EMPTY, JOINED, SPLIT, Block, Gpt, Step

_WIDTH, _LAYERS, _VOCABULARY = 32, 2, 64


PARTS: list[DeviceMesh] = []
"""The ranks that have the other parts of this rank's sequences."""


class GatheringBlock(Block):
    """A block whose rank has a part of each sequence, and attends to the keys of all parts."""

    def forward(self, features: Tensor) -> Tensor:
        """Features [samples, T / cp, width] to features of the same shape."""
        normed = self.norm(features)
        query, key, value = (
            layer(normed).unflatten(2, (-1, self.head_width)).transpose(1, 2).contiguous()
            for layer in (self.query, self.key, self.value)
        )
        (parts,) = PARTS
        keys, values = (all_gather_tensor_autograd(each, gather_dim=2, group=parts) for each in (key, value))
        first, own, length = parts.get_local_rank() * query.shape[2], query.shape[2], keys.shape[2]
        seen = torch.arange(length)[None, :] <= torch.arange(first, first + own)[:, None]
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        features = features + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.feed_norm(features))))
        return features + added


DECODED: list[int] = []
"""Each row group that this rank has decoded."""


def count_decoding() -> None:
    """Count the row groups that this rank decodes."""
    decode = BlockDecoder.row_group

    def counted(decoder: BlockDecoder, path: str, row_group: int, rows: int) -> pa.Table:
        DECODED.append(row_group)
        return decode(decoder, path, row_group, rows)

    setattr(BlockDecoder, "row_group", counted)  # noqa: B010 - no reader counts them


def make_model(mesh: DeviceMesh) -> Gpt:
    """Return the stage of this rank, split over tensors and sharded over all ranks with other tokens."""
    model = Gpt(_LAYERS, _WIDTH, _VOCABULARY, stage=mesh["pp"].get_local_rank(), stages=mesh["pp"].size())
    data = mesh["dp", "cp"]._flatten("dp_cp")
    PARTS.append(mesh["cp"])
    for block in model.blocks.values():
        block.__class__ = GatheringBlock
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], {name: kind() for name, kind in {**SPLIT, **JOINED}.items()})
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model


def split(batch: dlac.Batch, mesh: DeviceMesh) -> tuple[tuple[Tensor, Tensor], list[list[int]], float]:
    """Return this rank's part of the sequences as inputs and targets, the rows of its share, and the factor of the losses."""
    tokens, mask, whole = batch["tokens"].long(), batch.valid[:, None].expand(batch["tokens"].shape), 0
    if "document" in batch.tensors:
        mask, whole = batch["document"] > 0, batch.tokens
    width = tokens.shape[1] // mesh.size()
    mine = slice(mesh.get_local_rank() * width, (mesh.get_local_rank() + 1) * width)
    entering = tokens[:, mine] % _VOCABULARY
    rows = [sequence[valid].tolist() for sequence, valid in zip(tokens, mask, strict=True) if valid.any()]
    scale = batch.readers * mesh.size() / (whole or batch.rows * tokens.shape[1])
    return (entering, entering.masked_fill(~mask[:, mine], EMPTY)), rows, scale


def main() -> None:
    """Train from the committed checkpoint, if there is one, to the end of the run."""
    count_decoding()
    with (
        dlac.training_run() as run,
        Path(run.spec.params["log"], f"{run.resume_point.nonce}-{run.rank}.jsonl").open("a") as log,
    ):
        mesh = run.mesh
        model = make_model(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.restore(dlac.DistributedState(model=model, optimizer=optimizer))
        step = Step(model, mesh)
        for batch in run.batches():
            values, rows, scale = None, None, 0.0
            if batch.tensors:
                values, rows, scale = split(batch, mesh["cp"])
            optimizer.zero_grad()
            loss = step.train(values, scale)
            optimizer.step()
            entry = {"step": batch.step, "share": run.coordinate.index, "rank": run.rank, "rows": rows}
            print(json.dumps({"attempt": run.resume_point.attempt, **entry}), file=log, flush=True)
            os.fsync(log.fileno())
            run.step_done(loss)
        about = {"decoded": len(DECODED), "share": run.coordinate.index, "attempt": run.resume_point.attempt}
        print(json.dumps(about), file=log, flush=True)


if __name__ == "__main__":
    main()
