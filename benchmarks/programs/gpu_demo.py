"""The demo's training script, unchanged.

With $DETERMINISTIC=1 PyTorch uses deterministic kernels only, and fails if it has none.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

_EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"


def main() -> None:
    """Choose kernels, and train."""
    torch.use_deterministic_algorithms(os.environ.get("DETERMINISTIC") == "1")
    sys.path.insert(0, str(_EXAMPLE))
    runpy.run_path(str(_EXAMPLE / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
