"""DLAC's dataset over Iceberg tables: the order of a run, in its own process. `benchmarks.mesh` has the runs themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from benchmarks.mesh_peers.cases import STEP
from dlac_pipeline.extensions.dataset import open_dataset
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import connect


def write(folder: Path, source: str, rows: range) -> None:
    """Append the rows to the source's table."""
    lakehouse = connect(LakehouseConfig().at_home(folder), create=True)
    lakehouse.create_namespace("src")
    data = pa.table({"row": pa.array(rows, pa.int64())})
    name = f"src.{source}"
    table = (
        lakehouse.catalog.load_table(name)
        if lakehouse.catalog.table_exists(name)
        else lakehouse.catalog.create_table(name, data.schema, properties={"write.parquet.row-group-limit": "40"})
    )
    table.append(data)


def open_rank(folder: Path, weights: dict[str, float], rank: int, ranks: int, state: Any) -> "_Rank":
    """Return the dataset of a rank."""
    sources: list[dict[str, Any]] = [{"table": f"src.{name}", "columns": ["row"]} for name in weights]
    spec: dict[str, Any] = {
        "run": "compared",
        "source": sources[0],
        "order": {"batch_size": STEP, "seed": 5},
        "launch": {"script": "none.py"},
    }
    if len(sources) > 1:
        for source, weight in zip(sources, weights.values(), strict=True):
            source["weight"] = weight
        spec["mixture"] = sources[1:]
        spec["order"]["steps"] = 1000
    path = folder / f"job-{rank}.yaml"
    path.write_text(yaml.safe_dump(spec))
    try:
        return _Rank(open_dataset(str(path), home=str(folder), rank=rank, world_size=ranks, state=state))
    except DlacError as err:
        raise ValueError(str(err)) from err


def reshard(states: list[Any], ranks: int) -> list[Any]:
    """Return the state, which is one for all ranks."""
    return [states[0]] * ranks


class _Rank:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._dataset:
            yield batch["row"].tolist()

    def state(self) -> Any:
        return self._dataset.state_dict()
