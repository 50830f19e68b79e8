"""DLAC on the accelerator of this node: `python -m benchmarks.gpu [--quick]`, or `make gpu`.

- kernels: nondeterministic kernels of a training step, by name.
- demo: the demo's training with a rank killed in the middle. Its losses are compared with those of an undisturbed run,
  bit by bit. demo-default does it with PyTorch's default kernels, on an accelerator only.
- memory: a training with states in memory, killed.
- mesh: the GPT of examples/mesh, its tensors split over two devices and its layers over two stages where there are as many.
- checkpoints: the wait of training for asynchronous checkpoints, and its throughput with and without them.
- loading: batches copied from page-locked memory on their own stream, compared with plain ones, and with no reader.

At most 40 minutes on an accelerator. Without one the same program measures the CPU, and reports this. `--out FILE` keeps the
results as JSON, rewritten after every part. `--docs FILE` only makes docs/evidence/gpu.md of such a file. A failed part does
not stop the others. The exit status is then 1, as it is if a figure misses its bar.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.gpu_parts.checkpoints import measure_checkpoints
from benchmarks.gpu_parts.identity import measure_identity
from benchmarks.gpu_parts.kernels import find_kernels
from benchmarks.gpu_parts.loading import measure_loading
from benchmarks.gpu_parts.memory import measure_memory
from benchmarks.gpu_parts.mesh import measure_mesh
from benchmarks.gpu_parts.node import MeasuredNode, find_node
from benchmarks.gpu_parts.page import page_of
from benchmarks.gpu_parts.sizes import sizes_for

PARTS = ("kernels", "demo", "memory", "mesh", "checkpoints", "demo-default", "loading")
_PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "gpu.md"
_LAST_BEGIN_S = 30 * 60
"""Seconds after which no part begins: the longest takes ten minutes."""


def main() -> int:
    """Measure, or write the page, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small models and few steps: under three minutes")
    parser.add_argument("--pairs", type=int, help="pairs of segments, and of blocks, in place of the usual number")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part to measure; may be repeated")
    parser.add_argument("--out", type=Path, help="JSON file of what is found")
    parser.add_argument("--docs", type=Path, help="JSON file of a measurement, of which docs/evidence/gpu.md is made")
    asked = parser.parse_args()
    if asked.docs:
        _PAGE.write_text(page_of(json.loads(asked.docs.read_text())))
        return 0
    measurement = Measurement(find_node(), quick=asked.quick, pairs=asked.pairs, out=asked.out)
    measurement.run(asked.only or PARTS)
    return measurement.report()


class Measurement:
    """All parts on one node."""

    def __init__(self, node: MeasuredNode, *, quick: bool, pairs: int | None, out: Path | None) -> None:
        self._node = node
        sizes = sizes_for(accelerated=node.accelerated, quick=quick)
        # the first pair of blocks is reported separately
        self._sizes = sizes if pairs is None else replace(sizes, pairs=pairs, block_pairs=pairs + 1)
        self._out = out
        self._began = time.time()
        self._figures: dict[str, Figure] = {}
        self._found: dict[str, Any] = {
            "machine": asdict(node),
            "quick": quick,
            "sizes": asdict(self._sizes),
            "day": time.strftime("%Y-%m-%d", time.gmtime(self._began)),
            "kernels": {},
            "failed": {},
        }

    def run(self, parts: Sequence[str]) -> None:
        """Run some parts. A failure is kept with its reason."""
        node, sizes = self._node, self._sizes
        measures: dict[str, Callable[[Path], dict[str, Figure]]] = {
            "kernels": self._find_kernels,
            "demo": lambda home: measure_identity(home, node, sizes, kernels="deterministic"),
            "memory": lambda home: measure_memory(home, node, sizes),
            "mesh": lambda home: measure_mesh(home, node, sizes),
            "demo-default": lambda home: measure_identity(home, node, sizes, kernels="default"),
            "loading": lambda home: measure_loading(home, sizes),
            "checkpoints": lambda home: measure_checkpoints(node, sizes),
        }
        for part in parts:
            if part != "demo-default" or node.accelerated:
                self._measure(part, measures[part])

    def report(self) -> int:
        """Print the figures, and return the exit status."""
        for part, why in self._found["failed"].items():
            print(f"{part} failed: {why}", flush=True)
        report("gpu", self._figures, device=self._node.device, device_name=self._node.name)
        holds = all(figure.holds for figure in self._figures.values())
        return 0 if holds and not self._found["failed"] else 1

    def _find_kernels(self, home: Path) -> dict[str, Figure]:
        found = self._found["kernels"] = find_kernels(self._sizes)
        return {
            "nondeterministic_kernels": Figure(value=len(found["kernels"]), unit="kernels"),
            "differing_gradients": Figure(value=len(found["differing_gradients"]), unit="parameters"),
        }

    def _measure(self, part: str, measure: Callable[[Path], dict[str, Figure]]) -> None:
        if time.time() - self._began > _LAST_BEGIN_S:
            self._found["failed"][part] = "not begun: 30 minutes were over"
            return
        began = time.time()
        try:
            with tempfile.TemporaryDirectory(prefix="dlac-gpu-") as home:
                self._figures |= measure(Path(home))
        except Exception as err:  # a failure must not lose the other parts
            traceback.print_exc()
            self._found["failed"][part] = f"{type(err).__name__}: {err}"
        self._figures[f"{part.replace('-', '_')}_took_s"] = Figure(value=time.time() - began, unit="s")
        self._figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
        self._found["minutes"] = (time.time() - self._began) / 60
        self._found["figures"] = {name: figure.to_json() for name, figure in self._figures.items()}
        if self._out is not None:
            self._out.write_text(json.dumps(self._found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
