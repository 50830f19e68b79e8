"""The lakehouse, tables and job file of a combination."""

import json
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.pairs_lab.factors import Combination
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.extensions.exchange.fork import adopt_checkpoint
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.empty_lakehouse import empty_lakehouse
from tests.extensions.listeners.listening import install_strangers

BATCH, EVERY, SECRET = 16, 5, "hunter2-never-show-me"
_ROWS, _MORE, _SECOND = 240, 96, 10_000
"""Rows of the source, rows that are appended to it, and the first row id of the second source."""
_SCRIPT = Path(__file__).parents[1] / "programs" / "pairs_rank.py"
IMPORTED_BY_INITIALIZE = "deepspeed.runtime.zero.muon.original_muon"
"""`deepspeed.initialize` imports it, and torch's inductor with it."""
EXCLUDED = 24
"""A rewind excludes the rows below this id."""
_DROP = """
import pyarrow.compute as pc

def drop(batch):
    return batch.filter(pc.not_equal(pc.bit_wise_and(batch["row_id"], 3), 0))
"""


def tokens_of(row: int) -> int:
    """Return the number of tokens of a document."""
    return 3 + row % 16


def rows_from(first: int, count: int) -> pa.Table:
    """Return rows of the source. Each token of a document is its row."""
    ids = np.arange(first, first + count)
    x = np.sin(ids[:, None] * np.array([1.0, 2.0, 3.0, 4.0])).astype(np.float32)
    tokens = pa.array([[int(row)] * tokens_of(int(row)) for row in ids], pa.list_(pa.int32()))
    return pa.table({"row_id": ids, "x": pa.array(list(x), pa.list_(pa.float32())), "tokens": tokens})


class Scene:
    """A lakehouse in a folder, and the job of a combination in it."""

    def __init__(self, combination: Combination, run: str, home: Path, mounts: ExitStack, seed: int) -> None:
        self.combination, self.run, self.home = combination, run, home
        self.chance = random.Random(f"{seed} {json.dumps(dict(combination))}")
        self.lakehouse: Lakehouse = empty_lakehouse(home)
        self.log, self.again, self.slow = home / "log", home / "again", home / "slow"
        self.log.mkdir()
        (home / "drop.py").write_text(_DROP)
        self.memory = self._memory(mounts)
        self.store = self._store(mounts)
        self.environment = {}
        if combination["extras"] == "listeners":
            (home / "strangers").mkdir()
            self.environment["PYTHONPATH"] = str(install_strangers(home / "strangers"))
        for name, first in {"src.t": 0, "src.u": _SECOND, "src.base": 0}.items():
            self.append(name, first, _ROWS)

    def append(self, name: str, first: int, count: int) -> None:
        """Append rows to a table, which is made if there is none."""
        rows = rows_from(first, count)
        self.lakehouse.catalog.create_table_if_not_exists(
            name, rows.schema, properties={"write.parquet.row-group-limit": "20"}
        )
        self.lakehouse.load(name).append(rows)

    def append_more(self) -> None:
        """Append the rows that the second launch of a following run reads."""
        self.append("src.t", _ROWS, _MORE)

    def reconnect(self) -> Lakehouse:
        """Open the lakehouse again."""
        self.lakehouse = connect(LakehouseConfig().at_home(self.home))
        return self.lakehouse

    @property
    def journaled_events(self) -> Path:
        """The file of the listener."""
        return self.home / "events.jsonl"

    def spec(self, run: str | None = None, *, ranks: str | None = None, **order: Any) -> JobSpec:
        """Write the job file of the run, or of another one with another number of ranks, and return the spec."""
        run, ranks = run or self.run, ranks or self.combination["ranks"]
        raw = self._raw(run, ranks, order)
        self.job_file(run).write_text(yaml.safe_dump(raw))
        return parse_spec(raw, origin="the benchmark").resolved(self.home)

    def job_file(self, run: str) -> Path:
        """Return the place of a run's job file."""
        return self.home / f"{run}.yaml"

    def _raw(self, run: str, ranks: str, order: dict[str, Any]) -> dict[str, Any]:
        chosen, is_base = self.combination, run != self.run
        sources, more = self._sources(is_base=is_base)
        raw: dict[str, Any] = {
            "run": run,
            "source": sources[0],
            "mixture": sources[1:],
            "order": {"batch_size": BATCH, "key_groups": 4, "seed": 3, "passes": 1, **order},
            "checkpoint": {"every_steps": EVERY, "memory_every_steps": 1, "memory": self.memory, "store": self.store},
            "launch": {"script": str(_SCRIPT), **self._launch(ranks)},
            "params": {
                "engine": chosen["engine"],
                "log": str(self.log),
                "pause_s": "0.03",
                "again": str(self.again),
                "slow": str(self.slow),
            },
            **more,
        }
        if chosen["extras"] == "listeners" and not is_base:
            raw["listeners"] = {"records": {"path": str(self.journaled_events)}}
        if chosen["extras"] == "secrets":
            raw["launch"]["env"] = {"PAIRS_PASSWORD": SECRET}
        return raw

    def _sources(self, *, is_base: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        kind, more = self.combination["source"], {}
        source: dict[str, Any] = {"table": "src.base" if is_base else "src.t", "columns": ["row_id", "x"]}
        if self.combination["extras"] == "row_keys":
            source |= {"row_keys": True, "identity_columns": ["row_id"]}
        if kind == "packed":
            source["columns"], more = ["tokens"], {"sequences": {"length": 16}}
        if kind == "transformed":
            source["transform"] = f"{self.home}/drop.py:drop"
        if kind == "followed" and not is_base:
            source |= {"follow": "appends", "identity_columns": ["row_id"]}
        second = {**source, "table": "src.u"}
        mixtures = {
            "mixed": [{**source, "weight": 0.6}, {**second, "weight": 0.4}],
            "late": [source, {**second, "place": "late"}],
        }
        return [source] if is_base else mixtures.get(kind, [source]), more

    def _launch(self, ranks: str) -> dict[str, Any]:
        engine = self.combination["engine"]
        if ranks == "replicas":
            return {
                "replicas": 2,
                "ranks_per_replica": 2 if engine == "dcp" else 1,
                "world_size": 4 if engine == "dcp" else 2,
            }
        preload = {"preload": ["deepspeed", IMPORTED_BY_INITIALIZE]} if engine.startswith("zero") else {}
        return {"world_size": 1 if ranks == "one" else 2, **preload}

    def live_rows(self) -> Counter[int]:
        """Return each live row of the sources, with the number of its samples or tokens in one pass."""
        kind = self.combination["source"]
        rows = list(range(_ROWS + (_MORE if kind == "followed" else 0)))
        if kind in ("mixed", "late"):
            rows += range(_SECOND, _SECOND + _ROWS)
        if kind == "transformed":
            rows = [row for row in rows if row & 3]
        return Counter({row: tokens_of(row) if kind == "packed" else 1 for row in rows})

    def _memory(self, mounts: ExitStack) -> str:
        kind = self.combination["memory"]
        if kind == "off":
            return ""
        if kind == "full":
            return str(mounts.enter_context(small_disk(self.home / "memory", "16k")))
        return mounts.enter_context(tempfile.TemporaryDirectory(prefix="pairs-", dir="/dev/shm"))

    def _store(self, mounts: ExitStack) -> str:
        store = self.home / "store"
        if self.combination["fault"] == "store full":
            return str(mounts.enter_context(small_disk(store, "8m")))
        return str(store)

    def adopt(self) -> dict[str, torch.Tensor]:
        """Begin the run from the weights of a pretrained model, and return them."""
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
        folder = self.home / "pretrained"
        folder.mkdir()
        save_file(dict(model.state_dict()), folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        adopt_checkpoint(self.lakehouse, self.spec(), foreign_checkpoint(folder))
        return dict(model.state_dict())


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
