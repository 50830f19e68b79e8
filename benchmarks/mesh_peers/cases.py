"""What a loader does at a change: `python -m benchmarks.mesh_peers.cases LOADER FOLDER`, in the loader's environment.

A loader is a module of this package with

    write(folder, source, rows)                    adds rows to a source
    open_rank(folder, weights, rank, ranks, state) returns a `Rank`. `weights` has a source's weight, by its name
    reshard(states, ranks)                         returns the states for another number of ranks

All ranks of a data-parallel coordinate are given the same rank here, so that their batches are equal without a comparison.
"""

import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

MICRO_BATCH, STEP = 4, 16
"""Samples of a rank's batch, and of a step."""

ROWS, BEFORE, APPENDED = 480, 160, 160
"""Rows of the source, those read before the change, and those added by it."""

OF_SOURCE, AFTER = 240, 96
"""Rows of each of two sources, and rows read of both after the change."""


class Rank(Protocol):
    """The loader of one data-parallel rank."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of each batch."""

    def state(self) -> Any:
        """Return the state after the last batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A change between two launches of a run."""

    name: str
    ranks: int = 4
    """Data-parallel ranks after the change. Before it there are 4."""
    append: bool = False
    blend: bool = False
    """Whether two sources are read, whose weights change."""


CASES = (
    Case(name="nothing"),
    Case(name="ranks", ranks=2),
    Case(name="rows", append=True),
    Case(name="ranks_and_rows", ranks=2, append=True),
    Case(name="weights", blend=True),
    Case(name="ranks_and_weights", ranks=2, blend=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The rows of a case, of those that the source had before the change, or the refusal."""

    repeated: int = 0
    missing: int = 0
    """Rows that the pass left out. With two sources no pass ends, and none are counted."""
    refused: str = ""


def sources_of(case: Case) -> dict[str, range]:
    """Return the rows of each source."""
    if case.blend:
        return {"one": range(OF_SOURCE), "two": range(1000, 1000 + OF_SOURCE)}
    return {"one": range(ROWS)}


def outcome_of(read: list[int], case: Case) -> Outcome:
    """Count the rows of a case."""
    times = Counter(read)
    known = [row for rows in sources_of(case).values() for row in rows]
    missing = 0 if case.blend else sum(times[row] == 0 for row in known)
    return Outcome(repeated=sum(max(0, times[row] - 1) for row in known), missing=missing)


def try_case(loader: Any, case: Case, folder: Path) -> Outcome:
    """Read, change, and read on: to the end of the pass, or so many rows of two sources."""
    for source, rows in sources_of(case).items():
        loader.write(folder, source, rows)
    read, states = _read(loader, folder, [1.0, 1.0] if case.blend else [1.0], [None] * 4, rows=BEFORE)
    if case.append:
        loader.write(folder, "one", range(ROWS, ROWS + APPENDED))
    try:
        if case.ranks != len(states):
            states = loader.reshard(states, case.ranks)
        more, _ = _read(loader, folder, [3.0, 1.0] if case.blend else [1.0], states, rows=AFTER if case.blend else None)
    except (AssertionError, ValueError, RuntimeError, KeyError) as err:
        return Outcome(refused=f"{type(err).__name__}: {' '.join(str(err).split())}"[:200])
    return outcome_of(read + more, case)


def _read(
    loader: Any, folder: Path, weights: list[float], states: list[Any], *, rows: int | None
) -> tuple[list[int], list[Any]]:
    """Read so many rows, or a pass, in steps of all ranks. Return the rows, and the states of the ranks."""
    named = dict(zip(("one", "two"), weights, strict=False))
    ranks = [loader.open_rank(folder, named, rank, len(states), state) for rank, state in enumerate(states)]
    batches = [iter(rank) for rank in ranks]
    found: list[int] = []
    ended: set[int] = set()
    while len(ended) < len(ranks) and (rows is None or len(found) < rows):
        for place in [*range(len(ranks))] * (STEP // MICRO_BATCH // len(ranks)):
            batch = None if place in ended else next(batches[place], None)
            if batch is None:
                ended.add(place)
            found += batch or []
    return found, [rank.state() for rank in ranks]


def main() -> None:
    """Try all cases of a loader, and print their outcomes."""
    name, folder = sys.argv[1:]
    loader = importlib.import_module(f"{__package__}.{name}")
    for case in CASES:
        outcome = try_case(loader, case, Path(tempfile.mkdtemp(prefix=f"{case.name}-", dir=folder)))
        print(json.dumps({"case": case.name, **asdict(outcome)}), flush=True)


if __name__ == "__main__":
    main()
