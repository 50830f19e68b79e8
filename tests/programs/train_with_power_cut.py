"""A run of SPEC that may lose power. It makes a missing lakehouse and table, and marks acknowledged checkpoints."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.config import home_folder
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import read_spec
from tests.power_cut import mark

ROWS = 48


def main(path: Path) -> None:
    """Make the lakehouse, and train."""
    spec = read_spec(path).resolved(home_folder())
    lakehouse = connect(spec.lakehouse)
    if not lakehouse.catalog.table_exists("src.t"):
        rows = pa.table({"row_id": np.arange(ROWS), "x": np.linspace(0, 1, ROWS, dtype=np.float32)})
        lakehouse.create_namespace("src")
        lakehouse.catalog.create_table("src.t", rows.schema).append(rows)
    with dlac.training_run(path) as run:
        model = torch.nn.Linear(1, 1)
        run.restore(dlac.TorchState(model=model))
        committed = 0
        for batch in run.batches():  # which commits the checkpoint of the step before
            if committed:
                mark(f"{committed}")
            run.step_done(batch.mean(model(batch["x"][:, None]).squeeze(-1)))
            committed = 0 if batch.step % (spec.checkpoint.steps_between or 1) else batch.step
    mark(f"{committed}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
