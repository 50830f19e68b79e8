"""Restarts from states in memory, of a training on the device: kills of a rank, and of all ranks."""

from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.gpu_parts.node import MeasuredNode
from benchmarks.gpu_parts.sizes import Sizes
from benchmarks.memory_recovery import measure_size


def measure_memory(home: Path, node: MeasuredNode, sizes: Sizes) -> dict[str, Figure]:
    """Kill a training of each size, and compare it with an undisturbed one."""
    figures: dict[str, Figure] = {}
    for name, size in sizes.memory.items():
        folder = home / name
        folder.mkdir()
        found = measure_size(
            name,
            size,
            folder,
            sizes.memory_kills,
            world_size=node.ranks,
            on_accelerator=node.accelerated,
            environment=node.environment,
        )
        figures |= {f"memory_{figure}": value for figure, value in found.items()}
    return figures
