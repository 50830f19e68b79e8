"""Judgement of a combination by the script's own log: rows, the chain of digests, learning rates, and what is left over."""

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from benchmarks.pairs_lab.log import Entry, Step, WrongCombination
from benchmarks.pairs_lab.scene import BATCH, SECRET, Scene
from dlac_pipeline.audit.audit import audit_run

_RATE, _DECAY = 0.05, 0.97
_ENDS_WITHIN_S = 20.0


def check(holds: bool, message: str) -> None:
    """Raise `WrongCombination` unless something holds."""
    if not holds:
        raise WrongCombination(message)


def check_rows(steps: list[Step], live: Counter[int], excluded: set[int], began: int, *, rest: int) -> int:
    """Check that each live row was consumed once, and each excluded one only before step `began`. Return the pending rows.

    A following run may leave `rest` rows for its next launch.
    """
    check([step.number for step in steps] == list(range(1, len(steps) + 1)), f"steps {[step.number for step in steps]}")
    found: Counter[int] = Counter()
    for step in steps:
        found += step.rows
    for row in excluded:
        before = sum(step.rows[row] for step in steps if step.number < began)
        check(
            found[row] == before <= live[row],
            f"excluded row {row}: {found[row]} times, {before} times before its exclusion",
        )
    wanted = Counter({row: count for row, count in live.items() if row not in excluded})
    counted = Counter({row: count for row, count in found.items() if row not in excluded})
    repeated, missing = counted - wanted, wanted - counted
    check(not repeated, f"repeated: {dict(sorted(repeated.items())[:10])}")
    check(missing.total() <= rest, f"missing: {dict(sorted(missing.items())[:10])} ({len(missing)} rows)")
    return missing.total()


def check_chain(steps: list[Step], *, first: Entry | None, decays: int, is_replicated: bool) -> None:
    """Check the digests and learning rates. `first` has digests that the first step begins with, after `decays` steps.

    Replica groups seed their generators in each step.
    """
    for step in steps:
        for end in step.ends:
            rate = _RATE * _DECAY ** (step.number + decays)
            check(
                end["lr"] == pytest.approx(rate, rel=1e-9), f"step {step.number}: learning rate {end['lr']}, not {rate}"
            )
        weights = {end["after"]["weights"] for end in step.ends}
        check(len(weights) == 1, f"step {step.number}: ranks end with different weights")
    if first is not None:
        for name, digest in first.items():
            check(digest == steps[0].shares[0]["before"][name], f"step 1 begins with other {name} than its origin")
    for one, other in pairwise(steps):
        _check_link(one, other, ("moments",) if is_replicated else ("moments", "generator"))


def _check_link(one: Step, other: Step, names: tuple[str, ...]) -> None:
    known = {end["pid"] for end in one.ends}
    replicas = one.attempt == other.attempt
    ends = {end["rank"]: end["after"] for end in one.ends}
    for share in other.shares:
        if replicas and share["pid"] not in known:
            continue  # a newcomer gets the state of a peer in the course of its first step
        weights = one.ends[0]["after"]["weights"]
        what = f"rank {share['rank']} in step {other.number} (attempt {other.attempt} after {one.attempt})"
        check(
            share["before"]["weights"] == weights, f"{what} begins with other weights than step {one.number} ended with"
        )
        if len(one.shares) == len(other.shares) and share["rank"] in ends:
            for name in names:
                check(share["before"][name] == ends[share["rank"]][name], f"{what} begins with other {name}")


def check_audit(scene: Scene, steps: list[Step], pending: int) -> None:
    """Check that the audit is exact and says what the log says."""
    report = audit_run(scene.lakehouse, scene.run)
    check(report.exact, f"the audit is not exact: {report.to_json()}")
    check(report.step == len(steps), f"the audit names step {report.step}, the log {len(steps)}")
    if scene.combination["source"] != "packed":
        rows = sum((step.rows.total() for step in steps), 0)
        check(report.rows_consumed == rows, f"the audit counts {report.rows_consumed} rows, the log {rows}")
        check(report.rows_pending == pending, f"the audit has {report.rows_pending} rows pending, the log {pending}")


def check_nothing_left(scene: Scene) -> None:
    """Check that no file is left in memory, no process, and the secret nowhere but in the job files."""
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while left := _processes_of(scene):
        check(time.monotonic() < deadline, f"processes are left: {left}")
        time.sleep(0.1)
    kept = [str(path) for path in Path(scene.memory).rglob("*") if path.is_file()] if scene.memory else []
    check(not kept, f"left in memory: {kept}")
    if scene.combination["extras"] == "secrets":
        jobs = {scene.job_file(scene.run), scene.job_file("base")}
        files = [
            path for path in scene.home.rglob("*") if path.is_file() and path not in jobs and not _is_own_job(path)
        ]
        shown = [str(path.relative_to(scene.home)) for path in files if SECRET.encode() in path.read_bytes()]
        check(not shown, f"the secret is in {shown}")


def _is_own_job(path: Path) -> bool:
    """Return True for a launch's copy of the job file that only its owner can read."""
    return path.name == "spec.json" and not path.stat().st_mode & 0o077


def _processes_of(scene: Scene) -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        mine = f"dlac {scene.run} " in line or str(scene.home) in line
        if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.info['pid']}: {line[:100]}")
    return found


def rest_of(scene: Scene) -> int:
    """Return how many rows may wait for the next launch."""
    return BATCH - 1 if scene.combination["source"] == "followed" else 0
