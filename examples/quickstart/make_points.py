"""Write 3,000,000 points to a folder of Parquet files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Path("points").mkdir()
for number in range(3):
    x = np.random.default_rng(number).normal(size=1_000_000).astype("float32")
    pq.write_table(pa.table({"x": x, "y": 3 * x + 1}), f"points/{number}.parquet", row_group_size=20_000)
