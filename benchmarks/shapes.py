"""DLAC's reader beside hand-written loaders, on tables of many shapes: `python -m benchmarks.shapes [--quick] [--only NAME,...]`.

Each shape is read in the table's order and shuffled, by one rank with two decoding threads, from the page cache, in a process
for each shape. The sides take turns, each with a whole pass, in several rounds:

- `hand`: torchdata's `StatefulDataLoader` over `ParquetFile.iter_batches`, a page of user code (`reader_lab/by_hand.py`).
  Shuffled, it takes the rows of four row groups at a time in random order. Of a table with deletes or a filter it reads
  pyiceberg's batch reader, in the table's order alone;
- `scanner`: pyarrow's scanner, whose record batches are discarded (of a table with deletes or a filter: pyiceberg's batch
  reader). It never shuffles.

A figure is the median over the rounds of DLAC's rows per second over the other side's: of wall clock and of CPU without the
opening, and of wall clock with it (DLAC: plan, first batch). Without the opening, DLAC's reader goes through the table again
and again: each pass begins and ends with the same amount decoded ahead, so it has exactly the work for its own batches. Beside
pyiceberg, which reads the whole table before it gives a batch, only the figure with the opening means something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyiceberg.table import DataScan

from benchmarks.figures import Figure, report
from benchmarks.reader_lab.by_hand import HandRows, ScannedRows, scan_files, stateful
from benchmarks.reader_lab.shapes import Shape, build, shapes
from dlac_pipeline.extensions.dataset import open_dataset
from dlac_pipeline.extensions.loader_check.tables import NAMESPACE, Lake
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.memory import ALLOCATOR_SETTINGS
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

ROUNDS = 5
Sides = dict[str, "Callable[[], _Pass]"]
"""One pass of each side."""


def main() -> None:
    """Measure every shape in a process of its own, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = [
        shape
        for shape in shapes(quick=arguments.quick)
        if not arguments.only or shape.name in arguments.only.split(",")
    ]
    if arguments.one:
        [shape] = [shape for shape in wanted if shape.name == arguments.one]
        print(json.dumps({name: figure.to_json() for name, figure in _measure(shape, arguments.rounds).items()}))
        return
    figures: dict[str, Figure] = {}
    for shape in wanted:
        command = [sys.executable, "-m", "benchmarks.shapes", *sys.argv[1:], "--one", shape.name]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ALLOCATOR_SETTINGS
        )
        lines = done.stdout.splitlines()
        print(*lines[:-1], sep="\n", flush=True)
        found = json.loads(lines[-1])
        figures |= {
            name: Figure(value=each["value"], unit=each["unit"], bar=each["bar"]) for name, each in found.items()
        }
    figures["rounds"] = Figure(value=arguments.rounds, unit="rounds")
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("shapes", figures)


class _Windows:
    """The reader in passes that follow each other. Each ends with as much decoded ahead as it began with."""

    def __init__(self, home: Path, spec: JobSpec) -> None:
        spec = spec.resolved(home)
        lakehouse = Lake(home).lakehouse
        plan = make_plan(lakehouse, spec.source)
        self._rows = int(plan.units.live_rows.sum())
        self._reader = open_leg(Plans(lakehouse), first_leg(spec, [plan]), spec).reader()
        self._batches = iter(self._reader)

    def one_pass(self) -> _Pass:
        """Read about as many rows as a pass has."""
        self._reader.prefetch.settle()
        wall, cpu, rows = time.perf_counter(), time.process_time(), 0
        while rows < self._rows:
            rows += next(self._batches).rows
        self._reader.prefetch.settle()
        return _Pass(0, time.perf_counter() - wall, time.process_time() - cpu, rows, rows)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of one pass, and the rows after its first batch."""

    opening_s: float
    wall_s: float
    cpu_s: float
    rows: int
    rows_after_first: int

    @property
    def rates(self) -> dict[str, float]:
        """Rows per second by figure."""
        return {
            "": self.rows_after_first / self.wall_s,
            "_cpu": self.rows_after_first / self.cpu_s,
            "_opened": self.rows / (self.opening_s + self.wall_s),
        }


def _measure(shape: Shape, rounds: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="dlac-shapes-") as home:
        build(Path(home), shape)
        for shuffle in (False, True):
            sides = _sides(Path(home), shape, shuffle=shuffle)
            for side in sides.values():
                side()  # the page cache, and what a library does once
            passes = [{name: side() for name, side in sides.items()} for _ in range(rounds)]
            rows = {one.rows for each in passes for name, one in each.items() if name != "dlac"}
            if len(rows) > 1:
                raise AssertionError(f"expected one number of rows from all sides of {shape.name}, found {rows!r}")
            figures |= _figures(shape, passes, shuffle=shuffle)
    return figures


def _sides(home: Path, shape: Shape, *, shuffle: bool) -> Sides:
    lake, columns, table = Lake(home), list(shape.columns), f"{NAMESPACE}.{shape.name}"
    settings: dict[str, Any] = {
        "table": table,
        "columns": columns,
        "ragged": list(shape.ragged),
        "nullable": list(shape.nullable),
    }
    settings |= {"row_filter": shape.row_filter, "batch_size": shape.batch_size, "shuffle": shuffle}
    sides: Sides = {
        "dlac_opened": lambda: _pass(open_dataset(home=home, rank=0, world_size=1, **settings).__iter__),
    }
    if shape.is_merged:

        def scan() -> DataScan:
            snapshot = lake.lakehouse.load(table)
            return snapshot.scan(row_filter=shape.row_filter or "true", selected_fields=shape.columns)

        sides["scanner"] = lambda: _pass(lambda: iter(scan().to_arrow_batch_reader()))
        if not shuffle:
            sides["hand"] = lambda: _pass(lambda: stateful(ScannedRows(scan(), columns, shape.batch_size)))
        return sides
    sides["dlac"] = _Windows(home, _spec(settings)).one_pass
    files = lake.files(shape.name)
    hand = HandRows(files, columns, shape.batch_size, shuffle=shuffle)
    sides["hand"] = lambda: _pass(lambda: stateful(hand))
    sides["scanner"] = lambda: _pass(lambda: scan_files(files, columns, shape.batch_size))
    return sides


def _spec(settings: dict[str, Any]) -> JobSpec:
    order = {"batch_size": settings["batch_size"], "shuffle": settings["shuffle"], "passes": 1000}
    source = {name: settings[name] for name in ("table", "columns", "ragged", "nullable")}
    return parse_spec(
        {"run": "shapes", "source": source, "order": order, "launch": {"script": "none.py"}}, origin="the benchmark"
    )


def _pass(begin: Callable[[], Iterator[Any]]) -> _Pass:
    began = time.perf_counter()
    batches = begin()
    first = _rows_of(next(batches))
    wall, cpu = time.perf_counter(), time.process_time()
    rows = 0
    for batch in batches:
        rows += _rows_of(batch)
    return _Pass(wall - began, time.perf_counter() - wall, time.process_time() - cpu, first + rows, rows)


def _rows_of(batch: Any) -> int:
    if not isinstance(batch, dict):
        return len(batch)
    if "dlac" in batch:
        return int(batch["dlac"]["rows"])
    offsets = [name for name in batch if name.endswith(".offsets")]
    return len(batch[offsets[0]]) - 1 if offsets else len(next(iter(batch.values())))


def _figures(shape: Shape, passes: list[dict[str, _Pass]], *, shuffle: bool) -> dict[str, Figure]:
    tag = f"{shape.name}_{'shuffled' if shuffle else 'in_order'}"
    figures: dict[str, Figure] = {}
    # pyiceberg reads the whole table before it gives the first batch
    parts = ("_opened",) if shape.is_merged else ("", "_cpu", "_opened")
    for other in sorted(passes[0].keys() - {"dlac", "dlac_opened"}):
        for part in parts:
            ours = "dlac_opened" if part == "_opened" else "dlac"
            ratio = statistics.median(each[ours].rates[part] / each[other].rates[part] for each in passes)
            bar = _bar(shape, other, part, shuffle=shuffle)
            figures[f"{tag}_over_{other}{part}"] = Figure(value=ratio, unit="ratio", bar=bar)
    medians = {
        "rows_per_s": {name: _median(passes, name, lambda one: one.rates[parts[0]]) for name in passes[0]},
        "opening_s": {name: _median(passes, name, lambda one: one.opening_s) for name in passes[0]},
        "ratios": {name: figure.value for name, figure in figures.items()},
    }
    print(json.dumps({"shape": tag, "loadavg": os.getloadavg()} | medians), flush=True)
    return figures


def _median(passes: list[dict[str, _Pass]], name: str, figure: Callable[[_Pass], float]) -> float:
    return statistics.median(figure(each[name]) for each in passes)


def _bar(shape: Shape, other: str, part: str, *, shuffle: bool) -> str | None:
    if shape.is_merged:
        return ">= 1.0"
    if other == "hand":
        return None if part == "_opened" else ">= 1.0"
    return None if part else ">= 0.7" if shuffle else ">= 0.85"


if __name__ == "__main__":
    main()
