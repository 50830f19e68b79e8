"""The rank of benchmarks/sharing.py: it reads a table, alone or with the other rank, and prints how long it waited."""

import json
import statistics
import sys
import time
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.slots import ALL_SLOTS, groups_of_slots
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.read.reader import Waits
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.train.rank_reader import SHARES, Reader, SharePlace

_STEP_S = 0.02
_WARM = 10
"""Batches before the first one that counts."""


def main() -> None:
    """Read so many batches."""
    home, kind, batch, shares, steps, name, rank = sys.argv[1:]
    raw = {
        "run": "shared",
        "source": {
            "table": f"src.{kind}",
            "columns": ["values"],
            "passes": 0,
            **({"ragged": ["values"]} if kind == "images" else {}),
        },
        "order": {"batch_size": int(batch), "key_groups": 8, "seed": 3, "steps": 1_000_000},
        "launch": {"script": "none", "world_size": 2, "mesh": {"tp": 2}},
    }
    spec = parse_spec(raw, origin="the benchmark").resolved(Path(home))
    lakehouse = connect(LakehouseConfig().at_home(Path(home)))
    leg = first_leg(spec, [make_plan(lakehouse, spec.source)])
    opened = open_leg(Plans(lakehouse), leg, spec)
    settings = opened.order.settings
    open_share = partial(opened.reader, coordinate=ALL_SLOTS)
    place = SharePlace(
        name=name,
        key=name.encode(),
        ranks=[0, 1],
        rank=int(rank),
        groups=groups_of_slots(ALL_SLOTS.slots(settings.batch_size), settings.samples_per_group),
        waits=Waits(),
    )
    waits = []
    reader: Reader = SHARES.load("node", setting="read.shares")(place, open_share) if shares == "node" else open_share()
    with closing(reader):
        batches, began = iter(reader), time.monotonic()
        cpu = time.process_time()
        for taken in islice(batches, int(steps)):
            for each in taken.tensors.values():  # each page is read once
                each.reshape(-1)[:: 4096 // each.itemsize].sum()
            waits.append(time.monotonic() - began)
            time.sleep(_STEP_S)
            began = time.monotonic()
        cpu = time.process_time() - cpu
    print(json.dumps({"wait_s": statistics.median(waits[_WARM:]), "cpu_s": cpu}))


if __name__ == "__main__":
    main()
