"""DLAC compared with alternatives: `python -m benchmarks.peers [--quick] [--only NAME,...]`.

One run on the same rows gives: the rows that each loader repeats and loses when it is killed, resized, resumed twice, resumed
in the second pass, and when the table changes before a resume; rows per second with two workers, shuffle off and on, of a whole
pass, from opening the loader to the last batch; seconds from
resume to the first batch at 1 %, 50 % and 99 % of a pass; bytes of state. All figures come from the row ids that the
loader's consumer logged. The cell of a loader that cannot be installed, or lacks a feature, has the reason.

The loaders are in `benchmarks/peer_loaders`, each in its own process, in environments that are made on the first run
(`.venv-peers`, and `.venv-peers-NAME` for those that need their own: a few minutes, about 10 GB).
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, report
from benchmarks.peer_loaders import environments, timing
from benchmarks.peer_loaders.timing import Resume, Speed
from dlac_pipeline.extensions.loader_check.client import LoaderFailed
from dlac_pipeline.extensions.loader_check.scenarios import SCENARIOS, Bench, Count, Scenario, Size, run_and_count
from dlac_pipeline.extensions.loader_check.tables import Lake

OURS = "dlac"
ENVIRONMENTS = {
    OURS: environments.OWN,
    "hf_parquet": environments.SHARED,
    "hf_iceberg": environments.SHARED,
    "dataloader_utils": environments.SHARED,
    "torchdata": environments.SHARED,
    "torchft": environments.OWN,
    "torchtitan": environments.TORCHTITAN,
    "mosaic": environments.MOSAIC,
    "litdata": environments.SHARED,
    "grain": environments.SHARED,
    "lancedb": environments.LANCEDB,
    "ray": environments.RAY,
    "dlrover": environments.DLROVER,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of measurement."""

    scenarios: Size
    timing: Size
    rounds: int


QUICK = Effort(
    scenarios=Size(files=8, groups=8, group_rows=32, sequence=64),
    timing=Size(files=16, groups=16, group_rows=128, sequence=512),
    rounds=3,
)
FULL = Effort(
    scenarios=Size(files=16, groups=16, group_rows=64, sequence=64),
    timing=Size(files=32, groups=16, group_rows=256, sequence=512),
    rounds=5,
)


@dataclass(kw_only=True, slots=True)
class Measured:
    """All results of one loader."""

    failed: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Count | str] = field(default_factory=dict)
    converted: dict[str, float] = field(default_factory=dict)
    speed: dict[str, Speed] = field(default_factory=dict)
    resume: Resume | str = ""
    sequence: int = 0  # tokens in a timed row


def main() -> None:
    """Measure, show and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(ENVIRONMENTS))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and files are cleaned up
    names = arguments.only.split(",")
    if unknown := set(names) - set(ENVIRONMENTS):
        parser.error(f"expected some of {','.join(ENVIRONMENTS)}, found {','.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="dlac-peers-", ignore_cleanup_errors=True) as scratch:
        measured = measure(names, QUICK if arguments.quick else FULL, Path(scratch))
    show(measured)
    report("peers", figures(measured))


def measure(names: list[str], effort: Effort, scratch: Path) -> dict[str, Measured]:
    """Run every loader through every scenario, then time all of them in turn."""
    measured = {name: Measured() for name in names}
    lake, timed_lake = Lake(scratch / "lake"), Lake(scratch / "timed_lake")
    timed: dict[str, Bench] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            folder = scratch / name
            try:
                host = environments.open_host(name, ENVIRONMENTS[name], folder / "empty")
            except LoaderFailed as err:
                measured[name].failed = str(err)
                continue
            stack.callback(host.close)
            bench = Bench(host, lake, effort.scenarios, folder)
            _scenarios(measured[name], bench)
            measured[name].about = {**host.about, "launched twice": bench.relaunched}
            timed[name] = Bench(host, timed_lake, effort.timing, folder / "timed")
            timed[name].scratch.mkdir()
        _times(measured, timed, effort)
    return measured


def _scenarios(measured: Measured, bench: Bench) -> None:
    for scenario in SCENARIOS:
        measured.counts[scenario.name] = _outcome(bench, scenario)
        print(json.dumps({bench.host.name: {scenario.name: _cell(measured.counts[scenario.name])}}), flush=True)


def _outcome(bench: Bench, scenario: Scenario) -> Count | str:
    """Return the count, or why there is none. A failure with workers is retried without."""
    reason = scenario.refusal(bench.host.about["not_offered"])
    if reason is not None:
        return f"not offered: {reason}"
    try:
        return run_and_count(bench, scenario)
    except LoaderFailed as err:
        failed = str(err)
    try:
        alone = replace(bench, workers=0)
        return replace(run_and_count(alone, scenario), with_workers=failed)
    except LoaderFailed as err:
        return f"failed: {failed}" + (f"; without workers: {err}" if str(err) != failed else "")


def _times(measured: dict[str, Measured], timed: dict[str, Bench], effort: Effort) -> None:
    for order, shuffle in (("plain", False), ("shuffled", True)):
        found = timing.speeds(timed, shuffle=shuffle, rounds=effort.rounds)
        for name, speed in found.items():
            measured[name].speed[order] = speed
    for name, bench in timed.items():
        measured[name].resume = timing.resume(bench, rounds=effort.rounds)
        measured[name].sequence = effort.timing.sequence
        measured[name].converted = bench.converted[0] if bench.converted else {}


def figures(measured: dict[str, Measured]) -> dict[str, Figure]:
    """Return every number, with the bars that DLAC must meet."""
    found: dict[str, Figure] = {}
    for name, one in measured.items():
        bar = "<= 0" if name == OURS else None
        for scenario, count in one.counts.items():
            if isinstance(count, Count):
                tag = f"{name}.{scenario}" + (".without_workers" if count.with_workers else "")
                found[f"{tag}.repeated"] = Figure(value=count.repeated, unit="rows", bar=bar)
                found[f"{tag}.missing"] = Figure(value=count.missing, unit="rows", bar=bar)
                if count.left_out:
                    found[f"{tag}.left_out"] = Figure(value=count.left_out, unit="rows", bar=bar)
                found |= {f"{tag}.order_lost": Figure(value=1, unit="passes", bar=bar)} if count.order_lost else {}
                if count.uninterrupted not in (None, (0, 0)):
                    repeated, missing = count.uninterrupted or (0, 0)
                    found[f"{tag}.uninterrupted_repeated"] = Figure(value=repeated, unit="rows")
                    found[f"{tag}.uninterrupted_missing"] = Figure(value=missing, unit="rows")
                if count.appended_read is not None:
                    found[f"{tag}.appended_read"] = Figure(value=count.appended_read, unit="rows")
        if name == OURS:
            failed = [each for each in (one.failed, *one.counts.values(), one.resume) if isinstance(each, str) and each]
            failed += [speed.failed for speed in one.speed.values() if speed.failed]
            found[f"{name}.failed"] = Figure(value=len(failed), unit="scenarios", bar="<= 0")
        for order, speed in one.speed.items():
            if not speed.failed:
                found[f"{name}.{order}.token_rate"] = Figure(value=speed.rate * one.sequence, unit="tokens/s")
                found |= _speed(f"{name}.{order}", speed, measured.get(OURS, Measured()).speed.get(order))
        if isinstance(one.resume, Resume):
            for place, seconds in zip(("1pct", "50pct", "99pct"), one.resume.seconds, strict=True):
                found[f"{name}.resume_{place}.first_batch"] = Figure(value=seconds, unit="s")
            found[f"{name}.resume.state"] = Figure(value=one.resume.state_bytes, unit="bytes")
        for unit, value in one.converted.items():
            found[f"{name}.conversion.{unit}"] = Figure(value=value, unit="s" if unit == "seconds" else unit)
    return found


def _speed(tag: str, speed: Speed, ours: Speed | None) -> dict[str, Figure]:
    found = {
        f"{tag}.rate": Figure(value=speed.rate, unit="rows/s"),
        f"{tag}.rate_over_itself_spread": Figure(value=speed.spread, unit="ratio"),
    }
    if ours is not None and ours is not speed and not ours.failed:
        middle, spread = timing.ratio(ours, speed)
        found[f"{tag}.dlac_over_it"] = Figure(value=middle, unit="ratio", bar=">= 1")
        found[f"{tag}.dlac_over_it_spread"] = Figure(value=spread, unit="ratio")
    return found


def show(measured: dict[str, Measured]) -> None:
    """Print the table, and the same as Markdown."""
    rows = [
        (scenario.description, [_cell(one.counts.get(scenario.name, "")) for one in measured.values()])
        for scenario in SCENARIOS
    ]
    for order, description in (("plain", "throughput, shuffle off"), ("shuffled", "throughput, shuffle on")):
        rows += [(description, [_rate(one.speed.get(order), one.sequence) for one in measured.values()])]
    rows += [("first batch after resume at 1 / 50 / 99 %", [_first(one.resume) for one in measured.values()])]
    rows += [("state", [_state(one.resume) for one in measured.values()])]
    rows += [("conversion", [_conversion(one) for one in measured.values()])]
    rows[0] = (rows[0][0], [cell or one.failed for cell, one in zip(rows[0][1], measured.values(), strict=True)])
    table = Table("repeated / missing rows", *measured)
    for description, cells in rows:
        table.add_row(description, *cells)
    Console(width=200).print(table)
    print("| repeated / missing rows | " + " | ".join(measured) + " |\n|" + "---|" * (len(measured) + 1))
    for description, cells in rows:
        print(f"| {description} | " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    for name, one in measured.items():
        print(json.dumps({name: {"failed": one.failed} if one.failed else one.about}))


def _cell(count: Count | str) -> str:
    if isinstance(count, str):
        return count
    return f"{count.repeated} / {count.missing}" + (f" ({'; '.join(count.remarks)})" if count.remarks else "")


def _rate(speed: Speed | None, sequence: int) -> str:
    if speed is None:
        return ""
    if speed.failed:
        return f"failed: {speed.failed}"
    tokens = speed.rate * sequence / 1e6
    return f"{speed.rate:,.0f} rows/s, {tokens:.1f} M tokens/s (itself: ± {100 * speed.spread:.0f} %)"


def _first(resume: Resume | str) -> str:
    return resume if isinstance(resume, str) else " / ".join(f"{seconds:.2f}" for seconds in resume.seconds) + " s"


def _state(resume: Resume | str) -> str:
    return resume if isinstance(resume, str) else f"{resume.state_bytes:,} bytes"


def _conversion(one: Measured) -> str:
    if not one.converted:
        return "" if one.failed else "none: reads the table or its files"
    return f"{one.converted['seconds']:.1f} s, {one.converted['bytes'] / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
