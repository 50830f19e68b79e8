"""The GPT of examples/mesh, with a journal of the rows of each finished step."""

import runpy
from pathlib import Path
from typing import Any

import torch
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline as dlac

EXAMPLE = Path(__file__).parents[2] / "examples" / "mesh" / "train.py"


def main() -> None:
    """Train, and write an entry for each batch whose step is done."""
    record = dlac.TrainingRun.record_step

    def recorded(run: Any, loss: Any, *, applied: bool | None = None) -> bool:
        train_tiny.write_entry(run, run._batch, torch.zeros(()) if loss is None else loss)
        return record(run, loss, applied=applied)

    setattr(dlac.TrainingRun, "record_step", recorded)  # noqa: B010 - the example has no journal
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
