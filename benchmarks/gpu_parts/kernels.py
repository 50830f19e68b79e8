"""The nondeterministic kernels of a training step of the model, by name."""

import json
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_parts.node import PROGRAMS, run_program
from benchmarks.gpu_parts.sizes import Sizes


def find_kernels(sizes: Sizes) -> dict[str, Any]:
    """Return the names, and the parameters whose gradients differ in a repeated step."""
    asked = json.dumps({"model": asdict(sizes.model)})
    return run_program([sys.executable, str(PROGRAMS / "gpu_kernels.py"), asked])
