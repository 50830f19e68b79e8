"""The reader's state and the plan of a large table: `python -m benchmarks.state [--quick]`.

10 TB in row groups of 16 MB are 655,360 work units of 8,192 rows. There are 128 ranks, 1,024 key groups and a global batch of
8,192. The units are synthetic, and are processed by the code of a real run: written to and read from the lakehouse, cut, ordered,
opened at a late step. The state is that of a manifest: [pass, block, position, offset] of each source and key group, as
JSON. The other side is a pickled state of torchdata's StatefulDataLoader for the same table: a map of 128 ranks, with 4
workers each, whose datasets keep the minimum to resume a shuffled read: the order of its row groups and
its position in them. The smallest form, a seed instead of the order, is reported too.
"""

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped] # published without types

from benchmarks.figures import Figure, report
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.iceberg.row_groups import RowGroup
from dlac_pipeline.lakehouse.ledger.plans import PlanRow, read_units
from dlac_pipeline.plan import planner
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.plan import unit_table
from dlac_pipeline.plan.slices import write_cut
from dlac_pipeline.plan.source_order import SourceStart
from dlac_pipeline.plan.units import UnitTable

_RANKS, _WORKERS, _KEY_GROUPS, _BATCH = 128, 4, 1_024, 8_192
_GROUP_ROWS, _GROUP_BYTES, _FILE_GROUPS = 8_192, 16 * 2**20, 32


def main() -> None:
    """Measure state, planning and opening, each in a separate process, and report."""
    units = 65_536 if "--quick" in sys.argv[1:] else 655_360
    if "--part" in sys.argv[1:]:
        _part(sys.argv[-2], int(sys.argv[-1]))
        return
    figures: dict[str, Figure] = {}
    for part in _PARTS:
        figures |= _in_own_process(part, units)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("state", figures)


def _part(name: str, units: int) -> None:
    if name.startswith("write:"):
        _write(Path(name.removeprefix("write:")), units)
    else:
        _PARTS[name](units)


def _in_own_process(part: str, units: int) -> dict[str, Figure]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.state", "--part", part, str(units)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    *lines, last = done.stdout.splitlines()
    print(json.dumps({"part": part, "units": units, "loadavg": os.getloadavg(), "said": lines}), flush=True)
    return {name: Figure(**figure) for name, figure in json.loads(last).items()}


def _say(**figures: tuple[float, str, str | None]) -> None:
    print(
        json.dumps({name: {"value": value, "unit": unit, "bar": bar} for name, (value, unit, bar) in figures.items()})
    )


# State


def _state(units: int) -> None:
    """Measure the state's bytes in the middle of the second pass, packed, with a token offset in each of 4 sources."""
    table = _units(units)
    order = leg_of_tokens(source_of_tokens("p", passes=4)).order({"p": table})
    steps = 3 * int(table.rows.sum()) // _BATCH // 2
    mine = _bytes(order.reader_state(steps))
    random = np.random.default_rng(0)
    packed = [
        [[int(c.pass_index), int(c.block), int(c.position), int(random.integers(0, 4096))] for c in cursors]
        for cursors in order.reader_state(steps) * 4
    ]
    ordered, seeded = (_torchdata_bytes(units, seeded=each) for each in (False, True))
    _say(
        reader_state_bytes=(mine, "bytes", "<= 65536"),
        packed_4_sources_state_bytes=(_bytes(packed), "bytes", "<= 262144"),
        torchdata_state_bytes=(ordered, "bytes", None),
        torchdata_state_over_ours=(ordered / mine, "ratio", ">= 100"),
        torchdata_seed_only_state_bytes=(seeded, "bytes", None),
        torchdata_seed_only_state_over_ours=(seeded / mine, "ratio", None),
    )


def _bytes(state: Any) -> int:
    return len(json.dumps(state, separators=(",", ":")))


class _RowGroups(IterableDataset[int]):
    """One rank's row groups, divided among its workers. Its state is the shuffled order and its position."""

    def __init__(self, groups: int, *, seeded: bool) -> None:
        self._groups = groups
        self._seeded = seeded

    def __iter__(self) -> Any:
        yield from range(8)

    def state_dict(self) -> dict[str, Any]:
        share = self._groups // _RANKS // _WORKERS
        order: Any = 1234 if self._seeded else np.random.default_rng(0).permutation(self._groups)[:share].tolist()
        return {"row_groups": order, "next": share // 2, "row": 4_096, "pass": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _torchdata_bytes(units: int, *, seeded: bool) -> int:
    """Return the pickled states of all ranks. One is made by the real loader, and the others have the same size."""
    loader = StatefulDataLoader(_RowGroups(units, seeded=seeded), batch_size=2, num_workers=_WORKERS)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    return _RANKS * len(pickle.dumps(state))


# Planning


def _plan(units: int) -> None:
    """Write the plan, read it again, and write the slices of a pass."""
    with tempfile.TemporaryDirectory(prefix="dlac-state-") as home:
        lakehouse = connect(LakehouseConfig().at_home(Path(home)))
        before, started = _rss(), time.perf_counter()
        groups = _row_groups(units)
        listed_s = time.perf_counter() - started
        plan = planner.find_or_write(lakehouse, groups, **_FACTS)
        written_s = time.perf_counter() - started - listed_s
        planned_peak = _peak() - before
        plan_bytes = bytes_on_disk(lakehouse, "work_units")
        del groups
        order = leg_of_tokens(source_of_tokens(plan.row.plan_id, passes=4)).order({plan.row.plan_id: plan.units})
        started = time.perf_counter()
        write_cut(lakehouse, plan.row.plan_id, order.sources[0].cut_of(0))
        cut_s = time.perf_counter() - started
        _say(
            plan_listing_s=(listed_s, "s", None),
            plan_writing_s=(written_s, "s", None),
            plan_peak_mb=(planned_peak / 2**20, "MiB", None),
            plan_bytes=(plan_bytes, "bytes", None),
            plan_share_of_data=(100 * plan_bytes / (units * _GROUP_BYTES), "%", None),
            slices_writing_s=(cut_s, "s", None),
            slices_bytes=(bytes_on_disk(lakehouse, "slices"), "bytes", None),
            slices_peak_mb=((_peak() - before) / 2**20, "MiB", None),
        )


def _open(units: int) -> None:
    """Load a written plan, and open the order at 99 % of the third pass, like a rank before it reads."""
    with tempfile.TemporaryDirectory(prefix="dlac-state-") as home:
        row = write_plan_elsewhere(Path(home), units)
        lakehouse = connect(LakehouseConfig().at_home(Path(home)))
        before, started = _rss(), time.perf_counter()
        plan = unit_table(read_units(lakehouse, row))
        loaded_s = time.perf_counter() - started
        order = leg_of_tokens(source_of_tokens("p", passes=4)).order({"p": plan})
        late = int(2.99 * int(plan.rows.sum())) // _BATCH
        per_rank = _KEY_GROUPS // _RANKS
        started = time.perf_counter()
        state = order.reader_state(late)
        state_s = time.perf_counter() - started
        source = order.sources[0]
        started = time.perf_counter()
        for group in range(per_rank):
            walk = source.row_ranges(group, source.consumed_at(group, state[0][group]))
            next(walk), next(walk)
        _say(
            plan_loading_s=(loaded_s, "s", None),
            cursors_at_a_late_step_s=(state_s, "s", None),
            blocks_of_one_rank_s=(time.perf_counter() - started, "s", None),
            opened_peak_mb=((_peak() - before) / 2**20, "MiB", None),
        )


def write_plan_elsewhere(home: Path, units: int) -> PlanRow:
    """Return the plan, written by a process that has ended, so that its memory does not count."""
    command = [sys.executable, "-m", "benchmarks.state", "--part", f"write:{home}", str(units)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: PlanRow = pickle.loads(bytes.fromhex(done.stdout.splitlines()[-1]))
    return found


def _write(home: Path, units: int) -> None:
    plan = planner.find_or_write(connect(LakehouseConfig().at_home(home)), _row_groups(units), **_FACTS)
    print(pickle.dumps(plan.row).hex())


_FACTS = {
    "source_table": "lake.tokens",
    "table_uuid": "00000000-0000-0000-0000-000000000000",
    "snapshot_id": 1,
    "tag": "",
    "schema_id": 0,
    "row_filter": "",
    "columns": '["tokens"]',
    "exclude": "[]",
    "base_plan_id": None,
}


def _row_groups(units: int) -> list[RowGroup]:
    none = np.zeros(0, dtype=np.int64)
    return [
        RowGroup(
            file_path=f"s3://lake/warehouse/tokens/data/00000-{unit // _FILE_GROUPS:08d}-5f1c7d5e-5d0e-4b8f-a3f8-000000.parquet",
            row_group=unit % _FILE_GROUPS,
            first_row=unit % _FILE_GROUPS * _GROUP_ROWS,
            rows=_GROUP_ROWS,
            bytes=_GROUP_BYTES,
            dead=none,
        )
        for unit in range(units)
    ]


def _units(units: int) -> UnitTable:
    number = np.arange(units, dtype=np.int64)
    return UnitTable(
        file_paths=[f"f{file}" for file in range(-(-units // _FILE_GROUPS))],
        file=number // _FILE_GROUPS,
        row_group=number % _FILE_GROUPS,
        first_row=number % _FILE_GROUPS * _GROUP_ROWS,
        rows=np.full(units, _GROUP_ROWS, dtype=np.int64),
        bytes=np.full(units, _GROUP_BYTES, dtype=np.int64),
    )


def source_of_tokens(plan_id: str, *, passes: int) -> LegSource:
    """Return a source of which nothing was read."""
    return LegSource(
        name="tokens",
        table="lake.tokens",
        table_uuid="",
        snapshot_id=1,
        schema_id=0,
        plan_id=plan_id,
        columns=("tokens",),
        row_filter="",
        passes=passes,
        start=SourceStart.fresh(_KEY_GROUPS, [(plan_id, passes)]),
    )


def leg_of_tokens(*sources: LegSource) -> Leg:
    """Return the first leg of a run over the sources."""
    return Leg(
        index=0,
        start_step=0,
        seed=1,
        key_groups=_KEY_GROUPS,
        batch_size=_BATCH,
        block_slices=4,
        shuffle=True,
        sources=sources,
    )


def bytes_on_disk(lakehouse: Lakehouse, name: str) -> int:
    """Return the bytes of the current data files of one of DLAC's tables."""
    return sum(task.file.file_size_in_bytes for task in lakehouse.own(name).scan().plan_files())


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_PARTS = {"state": _state, "plan": _plan, "open": _open}

if __name__ == "__main__":
    main()
