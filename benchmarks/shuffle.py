"""Quality of the order's mixing: `python -m benchmarks.shuffle [--quick]`.

A table sorted by source (10 sources of unequal size) is read in passes with default settings (16 key groups, blocks of 4
slices, batches of 512). The comparisons are a full random permutation and MosaicML Streaming's py1e (its documented
algorithm: shards are shuffled, split at the canonical nodes' boundaries, and each sample is shifted by up to half the block
size). Here it has one node, its default number of canonical nodes, and its default block size of 4,000,000 / canonical nodes, at
least 2^18.

- source mixing: root mean square deviation of a batch's share of each source from the table's share. The second figure has
  each source in units of drawing with replacement, in which the smallest sources have the same weight as the largest
- neighbours in a batch: table distance of consecutive rows within a batch, as a share of the table (median; a
  random permutation has 0.29), and how many lie within one row group of each other
- passes: share of the pairs of rows that are in one batch in one pass and again in the next

The first figure has the bar: at most 1.1 times the random permutation's, at default settings.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import Figure, report
from dlac_pipeline.plan.cut import CutSettings, PassCut
from dlac_pipeline.plan.units import Ints, UnitTable
from dlac_pipeline.spec.job_spec import OrderSpec

_ORDER = OrderSpec(batch_size=512)
_CANONICAL_NODES = 64
_SHUFFLE_BLOCK = max(4_000_000 // _CANONICAL_NODES, 1 << 18)
"""Streaming's defaults for `num_canonical_nodes` (64 x nodes with its older shufflers) and `shuffle_block_size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A table, as the rows of its units in table order, and the cut of a pass over it."""

    name: str
    rows: Ints
    key_groups: int = _ORDER.key_groups
    block_slices: int = _ORDER.block_slices
    batch_size: int = _ORDER.batch_size
    bar: bool = False


def cases(*, quick: bool) -> list[Case]:
    """Return the default settings, and then harder cases."""
    random = np.random.default_rng(5)
    units = 500 if quick else 2_000
    even = np.full(units, 1_000)
    uneven = random.integers(100, 1_901, size=units)
    skewed = np.clip(random.lognormal(6, 1.3, size=units), 10, 20_000).astype(np.int64)
    return [
        Case(name="default", rows=even, bar=True),
        Case(name="uneven_units", rows=uneven),
        Case(name="skewed_units", rows=skewed),
        Case(name="few_units", rows=np.full(80, 4_000)),
        Case(name="fewer_units_than_slices", rows=np.full(40, 8_000)),
        Case(name="units_not_a_multiple", rows=np.full(units // 2 + 37, 1_000)),
        Case(name="many_key_groups", rows=np.full(2 * units, 500), key_groups=256, block_slices=4),
        Case(name="one_slice", rows=even, block_slices=1),
        Case(name="large_batches", rows=even, batch_size=4096),
        Case(name="sizes_follow_the_sources", rows=np.sort(skewed)),
    ]


def main() -> None:
    """Measure every case, and report."""
    quick = "--quick" in sys.argv[1:]
    figures: dict[str, Figure] = {}
    for case in cases(quick=quick):
        figures |= _measure(case, passes=3 if quick else 6)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("shuffle", figures)


# Orders: row numbers in reading order, int64 [rows]


def dlac(case: Case, pass_index: int) -> Ints:
    """Return the consecutive global batches of a pass, without rows that fill no batch."""
    units = _units(case.rows)
    settings = CutSettings(seed=_ORDER.seed, key_groups=case.key_groups, block_slices=case.block_slices, shuffle=True)
    # The passes before it determine which groups get the odd rows.
    cut = PassCut(units, settings, pass_index, np.zeros(case.key_groups, dtype=np.int64))
    first = np.cumsum(case.rows) - case.rows
    per_group = case.batch_size // case.key_groups
    lines = [_line(cut, group, first) for group in range(case.key_groups)]
    steps = min(len(line) for line in lines) // per_group
    return np.stack([line[: steps * per_group].reshape(steps, per_group) for line in lines], axis=1).reshape(-1)


def _line(cut: PassCut, group: int, first: Ints) -> Ints:
    parts = []
    for index in range(cut.block_count(group)):
        block = cut.block(group, index)
        row = block.rows_of(0, block.live_rows)
        slot = np.searchsorted(block.base, row, side="right") - 1
        parts.append(first[block.slices.unit[slot]] + block.slices.first[slot] + row - block.base[slot])
    return np.concatenate(parts)


def permutation(case: Case, pass_index: int) -> Ints:
    """All rows in random order."""
    return np.random.default_rng([1, pass_index]).permutation(int(case.rows.sum()))


def py1e(case: Case, pass_index: int) -> Ints:
    """Return Streaming's py1e order. Units are its shards."""
    random = np.random.default_rng(9176 + pass_index)
    total = int(case.rows.sum())
    first = np.cumsum(case.rows) - case.rows
    spans = [(int(start), int(start + size)) for start, size in zip(first, case.rows, strict=True)]
    random.shuffle(spans)
    nodes = _split(spans, total, _CANONICAL_NODES)
    # Every canonical node's samples are shifted within its own line. A batch takes from all nodes in turn.
    lines = [_shift(node, random) for node in nodes]
    length = min(len(line) for line in lines)
    return np.stack([line[:length] for line in lines], axis=1).reshape(-1)


def _split(spans: list[tuple[int, int]], total: int, nodes: int) -> list[list[tuple[int, int]]]:
    bounds = [total * node // nodes for node in range(nodes + 1)]
    parts: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
    at, node = 0, 0
    for first, end in spans:
        begin = first
        while begin < end:
            take = min(end - begin, bounds[node + 1] - at)
            parts[node].append((begin, begin + take))
            begin, at = begin + take, at + take
            if at == bounds[node + 1] and node + 1 < nodes:
                node += 1
    return parts


def _shift(spans: list[tuple[int, int]], random: np.random.Generator) -> Ints:
    sizes = np.array([end - begin for begin, end in spans])
    rows = np.concatenate([random.permutation(np.arange(begin, end)) for begin, end in spans])
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    ends = starts + np.repeat(sizes, sizes)
    # Each shard's samples are moved so that it spreads over half a block to either side, within the line.
    half = np.maximum(0, _SHUFFLE_BLOCK - np.repeat(sizes, sizes)) / 2
    low = np.maximum(0, starts - half) - starts
    high = np.minimum(len(rows), ends + half) - ends
    position = np.arange(len(rows)) + random.uniform(low, np.maximum(low, high))
    return rows[np.argsort(position, kind="stable")].astype(np.int64)


# Measures


def _measure(case: Case, passes: int) -> dict[str, Figure]:
    orders: dict[str, Callable[[Case, int], Ints]] = {"dlac": dlac, "permutation": permutation, "py1e": py1e}
    deviation, scaled, distance, near, overlap = {}, {}, {}, {}, {}
    for name, order in orders.items():
        lines = [_batches(order(case, index), case.batch_size) for index in range(passes)]
        deviations = np.array([_deviation(line, case) for line in lines]).mean(axis=0)
        deviation[name], scaled[name] = float(deviations[0]), float(deviations[1])
        distance[name] = (
            float(np.median(np.concatenate([_steps(line).reshape(-1) for line in lines]))) / case.rows.sum()
        )
        near[name] = float(np.mean([(_steps(line) < case.rows.mean()).mean() for line in lines]))
        overlap[name] = float(np.mean([_overlap(one, two) for one, two in itertools.pairwise(lines)]))
    ratio = deviation["dlac"] / deviation["permutation"]
    print(json.dumps({"case": case.name, "units": len(case.rows), "rows": int(case.rows.sum()), "deviation": deviation,
                      "scaled": scaled, "distance": distance, "near": near, "overlap": overlap}), flush=True)  # fmt: skip
    figures = {
        f"{case.name}_mixing_over_permutation": Figure(value=ratio, unit="ratio", bar="<= 1.1" if case.bar else None),
        f"{case.name}_mixing_each_source_alike": Figure(value=scaled["dlac"] / scaled["permutation"], unit="ratio"),
    }
    if case.bar:
        figures["mixing_py1e_over_permutation"] = Figure(
            value=deviation["py1e"] / deviation["permutation"], unit="ratio"
        )
        for name in orders:
            figures[f"{name}_mixing_deviation"] = Figure(value=deviation[name], unit="of a batch")
            figures[f"{name}_median_neighbour_distance"] = Figure(value=distance[name], unit="share of the table")
            figures[f"{name}_neighbours_within_a_unit"] = Figure(value=100 * near[name], unit="%")
            figures[f"{name}_pairs_together_again"] = Figure(value=100 * overlap[name], unit="%")
    return figures


def _units(rows: Ints) -> UnitTable:
    return UnitTable(
        file_paths=["f"],
        file=np.zeros(len(rows), dtype=np.int64),
        row_group=np.arange(len(rows)),
        first_row=np.cumsum(rows) - rows,
        rows=rows.astype(np.int64),
        bytes=rows.astype(np.int64) * 8,
    )


def _batches(order: Ints, batch_size: int) -> Ints:
    return order[: len(order) // batch_size * batch_size].reshape(-1, batch_size)


def _sources(case: Case) -> Ints:
    """Return the ends of the sources in the table: each is half as large again as the one before it, int64 [10]."""
    shares = 1.5 ** np.arange(10)
    ends: Ints = np.round(np.cumsum(shares) / shares.sum() * int(case.rows.sum())).astype(np.int64)
    return ends


def _deviation(batches: Ints, case: Case) -> tuple[float, float]:
    """Return the root mean square deviation of the shares, and that in units of drawing with replacement."""
    ends = _sources(case)
    share = np.diff(ends, prepend=0) / ends[-1]
    source = np.searchsorted(ends, batches, side="right")
    found = np.stack([(source == each).mean(axis=1) for each in range(len(ends))], axis=1)
    drawn = share * (1 - share) / batches.shape[1]
    squares = (found - share) ** 2
    return float(np.sqrt(squares.mean())), float(np.sqrt((squares / drawn).mean()))


def _steps(batches: Ints) -> Ints:
    steps: Ints = np.abs(np.diff(batches, axis=1))
    return steps


def _overlap(one: Ints, two: Ints) -> float:
    """Return the share of the pairs of rows in a batch of one pass that share a batch of the other, by a sample."""
    size = int(max(one.max(), two.max())) + 1
    batch_of = np.full(size, -1, dtype=np.int64)
    batch_of[two.reshape(-1)] = np.repeat(np.arange(len(two)), two.shape[1])
    random = np.random.default_rng(3)
    a, b = (random.integers(0, one.shape[1], size=(len(one), 4096)) for _ in range(2))
    first, second = (batch_of[np.take_along_axis(one, index, axis=1)] for index in (a, b))
    return float((first == second)[(a != b) & (first >= 0) & (second >= 0)].mean())


if __name__ == "__main__":
    main()
