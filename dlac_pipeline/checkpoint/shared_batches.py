"""Comparison of the batches of ranks that read one share: they hold the same bytes, or their gradients would mean nothing.

The first batch of an attempt is compared, and each `EVERY`-th after it. It is digested before a script can change it, and
compared once its step is done, when all ranks are at the same place.
"""

import msgpack
import torch
from blake3 import blake3

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.lakehouse.errors import ScriptInvalid
from dlac_pipeline.read.batch import Batch

EVERY = 1000


class SharedBatches:
    """Batches of a rank of an attempt. `share` is the number of the share of each batch that it reads."""

    def __init__(self, share: int, tree: RankTree, transforms: list[str]) -> None:
        """`transforms` of the sources are named in a difference."""
        self._share, self._tree, self._transforms = share, tree, transforms
        self._handed = 0
        self._noted: dict[int, dict[str, bytes]] = {}

    def note(self, batch: Batch) -> None:
        """Digest a batch that the reader has handed over, if it is one that is compared."""
        if self._handed % EVERY == 0:
            tensors = {**batch.tensors, "valid": batch.valid}
            self._noted[batch.step] = {name: _digest(each) for name, each in tensors.items()}
        self._handed += 1

    def compare(self, step: int) -> None:
        """Compare the batch of a finished step, if it was noted. Collective. Raise `ScriptInvalid` if ranks had other values."""
        mine = self._noted.pop(step, None)
        if mine is None:
            return
        gathered = self._tree.gather(msgpack.packb([self._share, mine]))
        with failing_together(self._tree, doing="comparing the batches of the ranks"):
            firsts: dict[int, tuple[int, dict[str, bytes]]] = {}
            for rank, (share, found) in enumerate(map(msgpack.unpackb, gathered or [])):
                first, expected = firsts.setdefault(share, (rank, found))
                if other := sorted(name for name in expected if expected[name] != found.get(name)):
                    cause = (
                        f"the transform {' or '.join(self._transforms)}"
                        if self._transforms
                        else "what the script reads"
                    )
                    raise ScriptInvalid(
                        f"expected the same batch of step {step} on the ranks {first} and {rank} of one replica, found other "
                        f"values in {other[0]!r}: make {cause} deterministic, as with a generator that is seeded by the row"
                    )


def _digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor's bytes, in host memory."""
    return blake3(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
