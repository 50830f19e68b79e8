"""Asynchronous checkpoints of a model on the device: the wait of training, and their cost in throughput."""

from dataclasses import replace

from benchmarks.figures import Figure
from benchmarks.gpu_parts.node import MeasuredNode
from benchmarks.gpu_parts.sizes import Sizes
from benchmarks.training import measure_training

_SHOWN = (
    *("parameters", "bytes", "pairs", "stall_s", "stall_alone", "block_without_s", "with_over_without"),
    *("without_over_without_low", "without_over_without_high", "committed_within_s"),
)


def measure_checkpoints(node: MeasuredNode, sizes: Sizes) -> dict[str, Figure]:
    """Measure blocks with and without a checkpoint. The bar holds for an accelerator and blocks of full length only."""
    environment = {} if node.accelerated else {"OMP_NUM_THREADS": "2"}
    found = measure_training(sizes.training, block_s=sizes.block_s, pairs=sizes.block_pairs, environment=environment)
    judged = node.accelerated and sizes.block_s >= 15.0
    figures = {f"checkpoint_{name}": found[name] if judged else replace(found[name], bar=None) for name in _SHOWN}
    throughput = 100 / found["with_over_without"].value
    return figures | {"checkpoint_throughput": Figure(value=throughput, unit="% of that without")}
