"""Time from resuming to the first batch: `python -m benchmarks.resume [--quick]`.

A table of 1,000 row groups (8 MB decoded each; --quick: 0.5 MB) is resumed at 1 %, 50 % and 99 % of a pass, in turn, with a new
connection to the lakehouse each time: shuffled with default settings, and in the table's order with 4 key groups. The comparison
at 99 % is a replay from the beginning: the same reader, from the first step on. Row groups and bytes read until the first batch
are counted where the files are opened. A reader has one block of every key group under its cursors. These must be decoded, so
that shuffled at default settings (16 key groups, 4 row groups each) at most 1 - 64 / 990 of a replay can be saved. The bar there
is 1.3 times that share.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import PyArrowFile

from benchmarks.figures import Figure, report
from benchmarks.reader import Kind, build, job
from dlac_pipeline.extensions.loader_check.tables import Lake
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.blocks import BlockDecoder
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg

_POSITIONS = (0.01, 0.5, 0.99)


def main() -> None:
    """Measure both ways of reading, and report."""
    quick = "--quick" in sys.argv[1:]
    shuffled = Kind(name="list", groups=1000, group_rows=256 if quick else 4096)
    in_order = Kind(name="list", groups=1000, group_rows=shuffled.group_rows, key_groups=4)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="dlac-resume-") as home:
        build(Path(home), shuffled)
        figures |= _measure(Path(home), in_order, shuffle=False, rounds=10)
        figures |= _measure(Path(home), shuffled, shuffle=True, rounds=10)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("resume", figures)


def _measure(home: Path, kind: Kind, *, shuffle: bool, rounds: int) -> dict[str, Figure]:
    spec = job(home, kind, shuffle=shuffle)
    leg = first_leg(spec, [make_plan(Lake(home).lakehouse, spec.source)])
    steps = kind.groups * kind.group_rows // kind.batch_size
    at = [round(position * steps) for position in _POSITIONS]
    seconds: dict[int, list[float]] = {step: [] for step in at}
    for _ in range(rounds + 1):
        for step in at:
            seconds[step].append(_first_batch_s(home, kind, leg, step, shuffle=shuffle))
    medians = [statistics.median(each[1:]) for each in seconds.values()]  # the first round warms the page cache
    replay_s = min(_replay_s(home, kind, leg, at[-1], shuffle=shuffle) for _ in range(2))
    counted = _count_reads(home, kind, leg, at[1], shuffle=shuffle)
    print(
        json.dumps({"shuffle": shuffle, "seconds": seconds, "replay_s": replay_s, "loadavg": os.getloadavg()}),
        flush=True,
    )
    tag = "shuffled" if shuffle else "in_order"
    under = kind.key_groups * (kind.block_slices if shuffle else 1)
    least = 100 * (1 - 1.3 * under / (_POSITIONS[-1] * kind.groups)) if shuffle else 99
    return {
        f"{tag}_first_batch_at_1_percent_s": Figure(value=medians[0], unit="s"),
        f"{tag}_first_batch_at_50_percent_s": Figure(value=medians[1], unit="s"),
        f"{tag}_first_batch_at_99_percent_s": Figure(value=medians[2], unit="s"),
        f"{tag}_99_over_1_percent": Figure(value=medians[2] / medians[0], unit="ratio", bar="<= 1.3"),
        f"{tag}_replay_to_99_percent_s": Figure(value=replay_s, unit="s"),
        f"{tag}_less_than_replay": Figure(value=100 * (1 - medians[2] / replay_s), unit="%", bar=f">= {least:.1f}"),
        # One more unit per key group than under the cursors may be read: a unit may be cut between key groups.
        f"{tag}_row_groups_until_first_batch": Figure(
            value=len(counted.groups), unit="row groups", bar=f"<= {under + kind.key_groups}"
        ),
        f"{tag}_bytes_until_first_batch": Figure(value=counted.bytes, unit="bytes"),
        f"{tag}_share_of_table_until_first_batch": Figure(value=100 * counted.bytes / _bytes_of(home, kind), unit="%"),
    }


def _open_leg(home: Path, kind: Kind, leg: Leg, *, shuffle: bool) -> OpenLeg:
    return open_leg(Plans(Lake(home).lakehouse), leg, job(home, kind, shuffle=shuffle))


def _first_batch_s(home: Path, kind: Kind, leg: Leg, step: int, *, shuffle: bool) -> float:
    started = time.perf_counter()
    with closing(_open_leg(home, kind, leg, shuffle=shuffle).reader(step=step)) as reader:
        batch = next(iter(reader))
        assert batch.step == step + 1
        return time.perf_counter() - started


def _replay_s(home: Path, kind: Kind, leg: Leg, step: int, *, shuffle: bool) -> float:
    started = time.perf_counter()
    with closing(_open_leg(home, kind, leg, shuffle=shuffle).reader()) as reader:
        last = deque(itertools.islice(reader, step + 1), maxlen=1).pop()
        assert last.step == step + 1
        return time.perf_counter() - started


@dataclass
class _Count:
    """Counts of reads from data files."""

    bytes: int = 0
    groups: set[tuple[str, int]] = field(default_factory=set)


def _count_reads(home: Path, kind: Kind, leg: Leg, step: int, *, shuffle: bool) -> _Count:
    """Count the reads until the first batch. Nothing is decoded ahead, because there is no budget for it."""
    opened = _open_leg(home, kind, leg, shuffle=shuffle)
    with (
        _counting() as count,
        closing(opened.reader(step=step, budget_bytes=0)) as reader,
    ):
        next(iter(reader))
    return count


@contextmanager
def _counting() -> Iterator[_Count]:
    count = _Count()
    opens, row_group = PyArrowFile.open, BlockDecoder.row_group

    def open_counted(self: PyArrowFile, seekable: bool = True) -> Any:
        stream = opens(self, seekable)
        return pa.PythonFile(_Stream(stream, count), mode="r") if "/data/" in self.location else stream

    def row_group_counted(self: BlockDecoder, path: str, number: int, rows: int) -> pa.Table:
        count.groups.add((path, number))
        return row_group(self, path, number, rows)

    with (
        mock.patch.object(PyArrowFile, "open", open_counted),
        mock.patch.object(BlockDecoder, "row_group", row_group_counted),
    ):
        yield count


class _Stream:
    """A file that counts the bytes read from it."""

    def __init__(self, stream: Any, count: _Count) -> None:
        self._stream = stream
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, size: int = -1) -> bytes:
        found: bytes = self._stream.read(size)
        self._count.bytes += len(found)
        return found

    def read_buffer(self, size: int | None = None) -> Any:
        """Read and count. Arrow calls this method if it exists."""
        found = self._stream.read_buffer(size)
        self._count.bytes += len(found)
        return found


def _bytes_of(home: Path, kind: Kind) -> int:
    """Return the column's bytes in all data files."""
    total = 0
    for path in Lake(home).files(kind.name):
        metadata = pq.read_metadata(path)
        place = metadata.schema.to_arrow_schema().get_field_index("tokens")
        total += sum(metadata.row_group(i).column(place).total_compressed_size for i in range(metadata.num_row_groups))
    return total


if __name__ == "__main__":
    main()
