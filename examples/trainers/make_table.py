"""Write 19,877 points to the Iceberg table `demo.points`, in an embedded lakehouse below `.dlac`."""

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect

ROWS = 19_877  # 124 batches of 160, and 37 rows
catalog = connect(LakehouseConfig().at_home(".dlac")).catalog  # a catalog of pyiceberg: SQLite and local files
x = np.random.default_rng(0).normal(size=ROWS).astype("float32")
points = pa.table({"row_id": np.arange(ROWS), "x": x, "y": 3 * x + 1})
catalog.create_namespace("demo")
catalog.create_table("demo.points", points.schema, properties={"write.parquet.row-group-limit": "500"}).append(points)
