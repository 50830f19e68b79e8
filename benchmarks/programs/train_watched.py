"""train_tiny, whose first rank writes a file in $WATCHED when an upload ("upload") or a commit to the ledger ("commit") begins.

Its state has 16 MB of random numbers, so that an upload takes a while.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlac_pipeline.checkpoint.commit import coordinator as committing
from dlac_pipeline.lakehouse.store_files import StoreFiles

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "programs"))
import train_tiny  # type: ignore[import-not-found]

_NUMBERS = 4 << 20


class Model(torch.nn.Linear):
    """A linear model with random numbers beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("numbers", torch.rand(_NUMBERS))


def marked(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Write the file of a kind before the function."""

    def replaced(*args: Any, **rest: Any) -> Any:
        if os.environ["RANK"] == "0":
            (Path(os.environ["WATCHED"]) / kind).touch()
        return real(*args, **rest)

    return replaced


def main() -> None:
    """Train as train_tiny does."""
    for home, name, kind in ((StoreFiles, "put", "upload"), (committing, "commit_checkpoint", "commit")):
        setattr(home, name, marked(kind, getattr(home, name)))
    setattr(torch.nn, "Linear", Model)  # noqa: B010 - mypy forbids the assignment of a class
    train_tiny.main()


if __name__ == "__main__":
    main()
