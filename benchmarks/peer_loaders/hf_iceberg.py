"""Hugging Face datasets: an Iceberg table streamed through pyiceberg, else as `hf_parquet`."""

import importlib

from pyiceberg.catalog import load_catalog

from benchmarks.peer_loaders import hf_parquet
from benchmarks.peer_loaders.rows import COLUMNS
from benchmarks.peer_loaders.stateful import StatefulLoader
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job

for _lazy in ("pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"):  # imported here, and not in a timed launch
    importlib.import_module(_lazy)

PACKAGES = ["datasets", "pyiceberg", "torchdata"]
SHARED_STATE = False
NOT_OFFERED: dict[str, str] = {}
NOTES = [
    "load_dataset('iceberg', streaming=True) on the table's current snapshot, else as hf_parquet",
    "load_dataset asks for a folder with data files even here: it is given one data file, which it does not read",
]


def open_loader(job: Job, state: bytes | None) -> StatefulLoader:
    """Return a loader over the current table."""
    catalog = load_catalog(**job.catalog)
    dataset = hf_parquet.datasets.load_dataset(
        "iceberg",
        data_files=[job.files[0]],
        catalog=catalog,
        table=job.table,
        split="train",
        streaming=True,
        columns=COLUMNS,
        filters=f"kind < {KINDS // 2}" if job.filtered else None,
    )
    return hf_parquet.loader_over(dataset, job, state)
