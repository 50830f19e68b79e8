"""What it costs to share decoded batches among the ranks of a node: `python -m benchmarks.sharing [--quick]`.

Two ranks of tensor parallelism read the same share of a table, with a step of 20 ms of waiting between two batches: both decode
it (`read.shares = "each"`), or one does, and the other one maps its memory ("node"). By turns, seven times, with batches of
tokens (0.25 MB), and of images (10 MB). The cost of a side is the median time that a rank waits for a batch, and the cost of
sharing the difference to decoding alone, in parts of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, report
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect

_PROGRAM = Path(__file__).parent / "programs" / "sharing_rank.py"
STEP_S = 0.02
_ROUNDS, _STEPS = 7, 200
Sides = dict[str, list[list[dict[str, float]]]]


def main() -> None:
    """Read, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds, steps = (2, 60) if parser.parse_args().quick else (_ROUNDS, _STEPS)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="dlac-sharing-") as home:
        _make_tables(Path(home))
        for kind, batch in (("tokens", 16), ("images", 64)):
            sides: Sides = {"each": [], "node": []}
            for number in range(rounds):
                for shares in sides if number % 2 else reversed(sides):
                    sides[shares].append(_read(Path(home), kind, batch, shares, steps, number))
            figures |= _compare(kind, sides)
    report("sharing", figures | {"load_average_1min": Figure(value=os.getloadavg()[0], unit="processes")})


def _make_tables(home: Path) -> None:
    lakehouse = connect(LakehouseConfig().at_home(home), create=True)
    lakehouse.create_namespace("src")
    chance = np.random.default_rng(5)
    tokens = chance.integers(0, 50_000, (4_000, 2_048), dtype=np.int32)
    images = [chance.bytes(160_000) for _ in range(1_600)]
    tables = {
        "tokens": pa.table({"values": pa.array(list(tokens), pa.list_(pa.int32()))}),
        "images": pa.table({"values": pa.array(images, pa.binary())}),
    }
    for name, rows in tables.items():
        properties = {"write.parquet.row-group-limit": "400"}
        lakehouse.catalog.create_table(f"src.{name}", rows.schema, properties=properties).append(rows)


def _read(home: Path, kind: str, batch: int, shares: str, steps: int, number: int) -> list[dict[str, float]]:
    """Return what each rank has measured."""
    name = f"{os.getpid()}-{kind}-{shares}-{number}"
    arguments = [str(home), kind, str(batch), shares, str(steps), name]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(_PROGRAM), *arguments, str(rank)], stdout=subprocess.PIPE, env=settings)
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=600)[0]) for rank in ranks]
    print(json.dumps({"kind": kind, "shares": shares, "ranks": found}), flush=True)
    return found


def _compare(kind: str, sides: Sides) -> dict[str, Figure]:
    median = {
        shares: [statistics.median(one[rank]["wait_s"] for one in rounds) for rank in range(2)]
        for shares, rounds in sides.items()
    }
    cpu = {
        shares: statistics.median(sum(each["cpu_s"] for each in one) for one in rounds)
        for shares, rounds in sides.items()
    }
    bar = "<= 0.03" if kind == "tokens" else None
    return {
        f"{kind}_first_rank_cost": Figure(
            value=(median["node"][0] - median["each"][0]) / STEP_S, unit="of a step", bar=bar
        ),
        f"{kind}_other_rank_cost": Figure(
            value=(median["node"][1] - median["each"][1]) / STEP_S, unit="of a step", bar=bar
        ),
        f"{kind}_cpu_node_over_each": Figure(value=cpu["node"] / cpu["each"], unit="x"),
    }


if __name__ == "__main__":
    main()
