"""Write 600 documents to a folder of Parquet files. Document 411 has a damaged number."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Path("docs").mkdir()
x = np.random.default_rng(7).normal(size=600).astype("float32")
y = 3 * x + 1
y[411] = 1e6
documents = {"doc_id": range(600), "title": [f"Document {number}" for number in range(600)], "x": x, "y": y}
pq.write_table(pa.table(documents), "docs/docs.parquet", row_group_size=100)
