"""The rank of benchmarks/recovery.py without DLAC: it loads DeepSpeed's latest checkpoint, and reads from the first row.

`recovery_bare.py CHECKPOINTS STAMPS FILE...`: folder of checkpoints, file of step stamps, the table's Parquet files.
"""

import os
import sys
from collections.abc import Iterator

import pyarrow.parquet as pq
import torch
from recovery_model import make_engine, stamp, train_step  # type: ignore[import-not-found]  # this folder is on the path
from recovery_sizes import BATCH, EVERY_STEPS, WIDTH  # type: ignore[import-not-found]


def main() -> None:
    """Train until a signal ends it."""
    checkpoints, stamps, *files = sys.argv[1:]
    world_size = int(os.environ["WORLD_SIZE"])
    engine = make_engine(world_size)
    engine.load_checkpoint(checkpoints)
    for features in batches(files, BATCH // world_size):
        train_step(engine, features)
        if engine.global_steps % EVERY_STEPS == 0:
            engine.save_checkpoint(checkpoints, tag=f"step-{engine.global_steps}")
        stamp(stamps, engine.global_steps)  # a stamped step has its checkpoint, and the benchmark kills between two


def batches(files: list[str], rows: int) -> Iterator[torch.Tensor]:
    """Yield rows in the order of the files, endlessly."""
    while True:
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(rows, columns=["x"]):
                if batch.num_rows == rows:
                    yield torch.from_numpy(batch["x"].flatten().to_numpy().copy()).view(rows, WIDTH)


if __name__ == "__main__":
    main()
