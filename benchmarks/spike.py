"""Bad rows of loss spikes: `python -m benchmarks.spike [--quick]`.

The rows are the sources of Python's standard library in pieces of 64 bytes, each with the share of blanks in the piece after it.
Two models train on two ranks with batches of 16. Of the steps with exactly one bad row, 50 are replayed by
`extensions/replay/spike.py`, each from the newest checkpoint before it.

- `planted`: a regression of the share on the bytes. Bad rows have it in percent, so the loss jumps.
- `hidden`: a small GPT. Bad rows are random bytes that no text has (128 to 255). The loss of their step hardly rises.

`first` counts the steps in which the bad row has the largest loss, `alone_to_blame` those in which the command would exclude it
alone, `found` those that the ledger's losses show without being asked for, and `false_alarms` the steps of spikes without a bad
row.
"""

import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, report
from dlac_pipeline.extensions.replay.loss_spikes import find_spikes
from dlac_pipeline.extensions.replay.spike import explain_spike
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_LENGTH, _BATCH, _EVERY = 64, 16, 10
_WARM_UP = 100
"""Steps before the first one that counts: an untrained model is surprised by every row."""
_ROOT = Path(__file__).parents[1]


def main() -> None:
    """Train, find, replay, and report."""
    quick = "--quick" in sys.argv[1:]
    steps, asked = (260, 5) if quick else (900, 50)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="dlac-spike-") as folder:
        lakehouse = connect(LakehouseConfig().at_home(Path(folder)), create=True)
        lakehouse.create_namespace("src")
        for kind in ("planted", "hidden"):
            planted = _write_rows(lakehouse, kind, steps * _BATCH, asked)
            outcome = Supervisor(Request(spec=_spec(Path(folder), kind))).run()
            assert outcome.step == steps, outcome
            figures |= _measure(lakehouse, kind, planted, asked)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("spike", figures)


def _measure(lakehouse: Lakehouse, run: str, planted: set[int], asked: int) -> dict[str, Figure]:
    """Find the spikes of a run, replay steps with one bad row, and return the figures."""
    rows = StepRows(lakehouse, run)
    losses = rows.steps.losses()
    bad = {step: [each.row for each in rows.of(step) if each.row in planted] for step in losses}
    chosen = [step for step, mine in bad.items() if len(mine) == 1 and step > _WARM_UP][:asked]
    assert len(chosen) == asked, len(chosen)
    spikes = {step for each in find_spikes(losses) for step in range(each.step, each.last_step + 1)}
    first = alone = different = 0
    seconds = []
    for step in chosen:
        started = time.perf_counter()
        found = explain_spike(lakehouse, run, step=step)
        seconds.append(time.perf_counter() - started)
        place = [row.row for _, row in found.rows].index(bad[step][0])
        first += place == 0
        alone += place == 0 and found.to_blame == 1
        different += not found.identical
        facts = {"run": run, "step": step, "place": place, "loss": losses[step], "is_spike": step in spikes}
        print(json.dumps({**facts, "largest": [loss for loss, _ in found.rows[:2]]}), flush=True)
    good = [step for step, mine in bad.items() if not mine]
    bar = f">= {0.96 * asked:g}"
    return {
        f"{run}_first": Figure(value=first, unit=f"of {asked}", bar=bar),
        f"{run}_alone_to_blame": Figure(value=alone, unit=f"of {asked}", bar=bar if run == "planted" else None),
        f"{run}_found": Figure(value=len(spikes.intersection(chosen)), unit=f"of {asked}"),
        f"{run}_false_alarms": Figure(value=len(spikes.intersection(good)), unit=f"of {len(good)} steps"),
        f"{run}_replays_not_identical": Figure(value=different, unit=f"of {asked}", bar="<= 0"),
        f"{run}_replay_p50_s": Figure(value=statistics.median(seconds), unit="s"),
    }


def _write_rows(lakehouse: Lakehouse, kind: str, count: int, asked: int) -> set[int]:
    """Write the table of a run, and return the numbers of its bad rows."""
    random.seed(0)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.shuffle(sources)
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), dtype=np.uint8)
    assert len(text) >= (count + 1) * _LENGTH, len(text)
    pieces = text[: (count + 1) * _LENGTH].reshape(-1, _LENGTH).astype(np.int32)
    blanks = np.isin(pieces, (9, 10, 32)).mean(axis=1).astype(np.float32)[1:]
    tokens = pieces[:-1].copy()
    planted = sorted(random.sample(range(count), asked + asked // 4 + 6))
    if kind == "planted":
        blanks[planted] = 100 * blanks[planted]
    else:
        tokens[planted] = np.random.default_rng(0).integers(128, 256, (len(planted), _LENGTH))
    columns = {"row_id": np.arange(count), "tokens": pa.array(list(tokens), pa.list_(pa.int32())), "blanks": blanks}
    table = pa.table(columns)
    properties = {"write.parquet.row-group-limit": "500"}
    lakehouse.catalog.create_table(f"src.{kind}", table.schema, properties=properties)
    lakehouse.load(f"src.{kind}").append(table)
    return set(planted)


def _spec(home: Path, kind: str) -> JobSpec:
    script = str(_ROOT / "benchmarks/programs/spike_rank.py")
    raw = {
        "run": kind,
        "source": {"table": f"src.{kind}", "columns": ["tokens", "blanks"], "identity_columns": ["row_id"]},
        "order": {"batch_size": _BATCH, "key_groups": 8, "seed": 1, "passes": 1},
        "checkpoint": {"every_steps": _EVERY},
        "launch": {"script": script, "world_size": 2, "env": {"PYTHONPATH": str(_ROOT)}},
        "params": {"kind": kind, "vocab_size": "256", "sequence_length": str(_LENGTH)},
    }
    return parse_spec(raw, origin="the benchmark").resolved(home)


if __name__ == "__main__":
    main()
