"""Cost of a ledger commit as the ledger grows: `python -m benchmarks.commit [--quick]`.

Four runs commit in turn to one ledger, with a checkpoint row and 64 advances each, through the commit of a real checkpoint.
`dlac ledger upkeep` runs after every 500 commits. Ledgers of 50 commits (twice, for the noise), 1,000 and 5,000 commits are then
measured together, one commit of each in turn, 50 before and 50 after the mark, so that other work of the node slows down
all of them. CPU seconds are reported too. The other side in the same run has ledgers without upkeep, where appends do not
expire snapshots. `--quick` grows to 200 commits only, and measures fewer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.figures import Figure, report
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, AdvanceRow, CheckpointRow, LedgerRow
from dlac_pipeline.lakehouse.maintenance import expiry

_RUNS, _ADVANCES, _UPKEEP_EVERY = 4, 64, 500


def main() -> None:
    """Measure with upkeep and without, and report."""
    quick = "--quick" in sys.argv[1:]
    marks, half, without = ((50, 200), 20, (40, 100)) if quick else ((50, 1_000, 5_000), 50, (50, 300))
    with tempfile.TemporaryDirectory() as folder:
        figures = _with_upkeep(Path(folder), marks, half) | _without(Path(folder), without, half // 2)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("commit", figures)


def _with_upkeep(folder: Path, marks: Sequence[int], half: int) -> dict[str, Figure]:
    grown = {f"{mark}": _Growth(folder / f"{mark}", mark - half) for mark in marks}
    grown[f"{marks[0]}_again"] = _Growth(folder / "again", marks[0] - half)
    _side_by_side(grown, 2 * half)
    base = grown[f"{marks[0]}"]
    figures: dict[str, Figure] = {}
    for name, growth in grown.items():
        figures |= growth.figures(f"at_{name}")
        if growth is not base:
            bar = "<= 1.5" if name == f"{marks[-1]}" else None
            figures[f"p50_at_{name}_over_{marks[0]}"] = Figure(value=growth.p50 / base.p50, unit="ratio", bar=bar)
            cpu = median(growth.cpu_s) / median(base.cpu_s)
            figures[f"cpu_p50_at_{name}_over_{marks[0]}"] = Figure(value=cpu, unit="ratio")
    return figures | grown[f"{marks[-1]}"].put_in_order(f"at_{marks[-1]}")


def _without(folder: Path, marks: Sequence[int], half: int) -> dict[str, Figure]:
    expire_in = expiry.expire_in
    setattr(expiry, "expire_in", lambda *_, **__: None)  # noqa: B010  # mypy knows no other way to replace a function
    try:
        grown = {f"{mark}": _Growth(folder / f"without-{mark}", mark - half, upkeep_every=0) for mark in marks}
        _side_by_side(grown, 2 * half)
    finally:
        setattr(expiry, "expire_in", expire_in)  # noqa: B010  # as above
    first, last = grown.values()
    kept = len(last.ledger.lakehouse.own("consumption").snapshots())
    assert kept > marks[1], kept  # nothing was expired
    ratio = Figure(value=last.p50 / first.p50, unit="ratio")
    figures = {f"without_upkeep_p50_at_{marks[1]}_over_{marks[0]}": ratio}
    for name, growth in grown.items():
        figures |= growth.figures(f"without_upkeep_at_{name}")
    return figures


def _side_by_side(grown: dict[str, _Growth], commits: int) -> None:
    for _ in range(commits):
        for growth in grown.values():
            growth.measure()
    print(json.dumps({"measured": list(grown), "commits_each": commits, "loadavg": os.getloadavg()}), flush=True)


@dataclass
class _Growth:
    """A ledger with `commits` commits."""

    home: Path
    commits: int
    upkeep_every: int = _UPKEEP_EVERY
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(connect(LakehouseConfig().at_home(self.home)))
        self._attempts = [Attempt(run=f"run-{number}", number=1, nonce="n") for number in range(_RUNS)]
        self._parents: dict[str, str | None] = {}
        for attempt in self._attempts:
            claim(self.ledger, attempt.run, nonce="n", replaces=0)
        self._step, started = 0, time.monotonic()
        for done in range(1, self.commits + 1):
            self._commit()
            if self.upkeep_every and done % self.upkeep_every == 0:
                run_upkeep(self.ledger.lakehouse)
        took_s = time.monotonic() - started
        print(json.dumps({"grown": self.home.name, "commits": self.commits, "seconds": round(took_s, 1)}), flush=True)

    @property
    def p50(self) -> float:
        """Median seconds of the measured commits."""
        return median(self.wall_s)

    def measure(self) -> None:
        """Time one more commit."""
        started, cpu = time.monotonic(), time.process_time()
        self._commit()
        self.wall_s.append(time.monotonic() - started)
        self.cpu_s.append(time.process_time() - cpu)

    def figures(self, suffix: str) -> dict[str, Figure]:
        """Return p50 and p99 of the measured commits."""
        return {
            f"p50_{suffix}": Figure(value=1e3 * self.p50, unit="ms"),
            f"p99_{suffix}": Figure(value=1e3 * quantiles(self.wall_s, n=100, method="inclusive")[98], unit="ms"),
            f"cpu_p50_{suffix}": Figure(value=1e3 * median(self.cpu_s), unit="ms"),
        }

    def put_in_order(self, suffix: str) -> dict[str, Figure]:
        """Run upkeep, and return its effect and the longer time of a recovery's read without it."""
        before, started = self._read_s(), time.monotonic()
        done = {each.table: each for each in run_upkeep(self.ledger.lakehouse)}["consumption"]
        return {
            f"upkeep_{suffix}": Figure(value=time.monotonic() - started, unit="s"),
            f"merged_files_{suffix}": Figure(value=done.merged_files, unit="files"),
            f"removed_files_{suffix}": Figure(value=done.removed_files, unit="files"),
            f"head_rows_before_upkeep_{suffix}": Figure(value=1e3 * before, unit="ms"),
            f"head_rows_after_upkeep_{suffix}": Figure(value=1e3 * self._read_s(), unit="ms"),
        }

    def _read_s(self) -> float:
        taken = []
        for _ in range(5):
            started = time.monotonic()
            self.ledger.rows("run-0", kinds=HEAD_KINDS)
            taken.append(time.monotonic() - started)
        return median(taken)

    def _commit(self) -> None:
        self._step += 1
        attempt = self._attempts[self._step % _RUNS]
        name, parent = f"{attempt.run}-{self._step:09d}", self._parents.get(attempt.run)
        rows: list[LedgerRow] = [CheckpointRow(checkpoint_id=name, parent=parent, losses=[0.5] * 10)]
        rows += [
            AdvanceRow(checkpoint_id=name, key_group=group, position_end=self._step, rows_consumed=8)
            for group in range(_ADVANCES)
        ]
        commit_checkpoint(self.ledger, attempt, checkpoint_id=name, parent=parent, rows=rows)
        self._parents[attempt.run] = name


if __name__ == "__main__":
    main()
