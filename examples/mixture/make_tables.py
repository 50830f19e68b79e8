"""Write the Iceberg tables `demo.points` (20,000 rows) and `demo.extra` (5,000 rows), in an embedded lakehouse below `.dlac`."""

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect

catalog = connect(LakehouseConfig().at_home(".dlac")).catalog
catalog.create_namespace("demo")
for seed, (name, rows) in enumerate({"demo.points": 20_000, "demo.extra": 5_000}.items()):
    x = np.random.default_rng(seed).normal(size=rows).astype("float32")
    table = pa.table({"row_id": np.arange(rows), "x": x, "y": 3 * x + 1})
    catalog.create_table(name, table.schema, properties={"write.parquet.row-group-limit": "500"}).append(table)
