"""Rows of any step of a large run: `python -m benchmarks.steps [--quick]`.

The plan has 655,360 row groups of 8,192 rows (10 TB in row groups of 16 MB), the run 1,024 key groups, a global batch of 8,192,
and a checkpoint every 300 steps. Units and ledger are synthetic, and written to a lakehouse. Random steps are computed by
`extensions/replay/step_rows.py`, and compared with SQL over the table `slices`, which repeats the order in integers
and uses none of its code. `dlac rows RUN --step N --json` is timed as a process, from its start to its end. The ledger has no row
per step: `ledger_growth` is what the ledger grew by while steps were asked for.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow

from benchmarks.figures import Figure, report
from benchmarks.state import bytes_on_disk, leg_of_tokens, source_of_tokens, write_plan_elsewhere
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.plans import read_units
from dlac_pipeline.lakehouse.ledger.schemas import CONSUMPTION
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow, LegRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import unit_table
from dlac_pipeline.plan.slices import write_cut

_RUN, _EVERY, _RANKS = "large", 300, 128
_DLAC = Path(sys.executable).with_name("dlac")
_ORACLE = """
WITH wanted AS (
    SELECT unnest($steps::BIGINT[]) AS step
),
blocks AS (
    SELECT key_group, block, any_value(block_rows) AS block_rows, any_value(a) AS a, any_value(c) AS c
    FROM slices GROUP BY ALL
),
placed AS (
    SELECT *, sum(block_rows) OVER (PARTITION BY key_group ORDER BY block) - block_rows AS before FROM blocks
),
samples AS (
    SELECT w.step, b.key_group, b.block, b.block_rows, (w.step - 1) * $per_group + k.k AS place, b.before, b.a, b.c, k.k
    FROM wanted AS w, range($per_group) AS k(k), placed AS b
    WHERE place >= b.before AND place < b.before + b.block_rows
),
rows AS (
    SELECT *, (a * (place - before) + c) % block_rows AS block_row FROM samples
)
SELECT r.step, r.key_group * $per_group + r.k AS slot, u.file_path, u.row_group, u.first_row + s.first_row + r.block_row - s.base
FROM rows AS r
JOIN slices AS s ON s.key_group = r.key_group AND s.block = r.block AND r.block_row >= s.base AND r.block_row < s.base + s.rows
JOIN units AS u ON u.unit = s.unit
ORDER BY 1, 2
"""


def main() -> None:
    """Measure, compare, and report."""
    quick = "--quick" in sys.argv[1:]
    units, steps, asked = (65_536, 50, 3) if quick else (655_360, 1_000, 15)
    with tempfile.TemporaryDirectory(prefix="dlac-steps-") as folder:
        home = Path(folder)
        plan = write_plan_elsewhere(home, units)
        lakehouse = connect(LakehouseConfig().at_home(home))
        leg = leg_of_tokens(source_of_tokens(plan.plan_id, passes=1))
        order = leg.order({plan.plan_id: unit_table(read_units(lakehouse, plan))})
        write_cut(lakehouse, plan.plan_id, order.sources[0].cut_of(0))
        last = order.total_steps
        assert last is not None
        _write_ledger(lakehouse, leg, last)
        random.seed(0)
        chosen = sorted(random.sample(range(1, last + 1), steps))
        before = bytes_on_disk(lakehouse, "consumption")
        rows = StepRows(lakehouse, _RUN)
        wrong, warm_s = _compare(rows, lakehouse, chosen, leg)
        cold_s = [_ask(home, step) for step in random.sample(chosen, asked)]
        grown = bytes_on_disk(lakehouse, "consumption") - before
    report(
        "steps",
        {
            "row_groups": Figure(value=units, unit="row groups"),
            "wrong_steps": Figure(value=wrong, unit=f"of {steps}", bar="<= 0"),
            "cold_p50_s": Figure(value=statistics.median(cold_s), unit="s", bar="<= 2"),
            "cold_max_s": Figure(value=max(cold_s), unit="s"),
            "warm_p50_s": Figure(value=statistics.median(warm_s), unit="s"),
            "ledger_growth": Figure(value=grown, unit="bytes", bar="<= 0"),
            "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
        },
    )


def _write_ledger(lakehouse: Lakehouse, leg: Leg, last: int) -> None:
    """Write a claim, the leg, and a checkpoint after every 300 steps."""
    steps = [*range(_EVERY, last, _EVERY), last]
    names = [f"{_RUN}-{step:09d}-0000" for step in steps]
    rows: list[LedgerRow] = [
        ClaimRow(seq=1, host="node"),
        LegRow(seq=2, checkpoint_id=names[0], leg_json=leg.to_json()),
    ]
    rows += [
        CheckpointRow(
            seq=2 + index,
            checkpoint_id=name,
            head_after=name,
            parent=names[index - 1] if index else None,
            step=step,
            world_size=_RANKS,
            losses=[0.5] * _EVERY,
        )
        for index, (name, step) in enumerate(zip(names, steps, strict=True))
    ]
    common = {"run": _RUN, "attempt": 1, "nonce": "0000", "committed_at": datetime.now(UTC), "format_version": 1}
    schema = schema_to_pyarrow(CONSUMPTION, include_field_ids=False)
    lakehouse.own("consumption").append(pa.Table.from_pylist([{**row.to_columns(), **common} for row in rows], schema))


def _compare(rows: StepRows, lakehouse: Lakehouse, steps: Sequence[int], leg: Leg) -> tuple[int, list[float]]:
    """Return how many steps differ from the SQL, and the seconds of each."""
    connection = duckdb.connect()
    connection.register("slices", lakehouse.read_own("slices"))
    connection.register("units", lakehouse.read_own("work_units"))
    wrong, seconds = 0, []
    for first in range(0, len(steps), 50):
        some = steps[first : first + 50]
        answer = connection.execute(_ORACLE, {"steps": some, "per_group": leg.batch_size // leg.key_groups}).fetchall()
        expected: dict[int, list[tuple[object, ...]]] = {}
        for step, *place in answer:
            expected.setdefault(step, []).append(tuple(place))
        for step in some:
            started = time.perf_counter()
            found = rows.of(step)
            seconds.append(time.perf_counter() - started)
            wrong += [(each.slot, each.file_path, each.row_group, each.row) for each in found] != expected[step]
        print(json.dumps({"steps": first + len(some), "wrong": wrong, "p50_s": statistics.median(seconds)}), flush=True)
    return wrong, seconds


def _ask(home: Path, step: int) -> float:
    """Return the seconds of the command for one step."""
    command = [str(_DLAC), "rows", _RUN, "--step", str(step), "--json", "--home", str(home)]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    seconds = time.perf_counter() - started
    assert len(json.loads(done.stdout)) > 0
    return seconds


if __name__ == "__main__":
    main()
