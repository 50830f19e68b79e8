"""Campaigns over many seeds, in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.simulation.rules import Rules, without
from tests.simulation.simulate import Outcome, simulate

_CHUNK = 500
"""Seeds that a process runs at once."""


@dataclass
class Total:
    """The results of many seeds."""

    seeds: int = 0
    failed: list[str] = field(default_factory=list)
    """Events and violation of each seed that fails."""
    claims: int = 0
    from_memory: int = 0
    """Claims that resumed from a copy in memory."""
    from_older: int = 0
    """Attempts with a copy of an older attempt than the replaced one."""
    replayed: Counter[int] = field(default_factory=Counter)
    """Steps executed again -> single faults."""

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        copies = [(claim.memory, claim.replaces) for claim in outcome.claims if claim.memory]
        self.seeds += 1
        self.failed += [str(outcome)] if outcome.violation else []
        self.claims += len(outcome.claims)
        self.from_memory += len(copies)
        self.from_older += sum(stamp.attempt < replaced for stamp, replaced in copies)
        self.replayed += outcome.replayed

    def merge(self, other: Total) -> None:
        """Count the seeds of another total."""
        self.seeds += other.seeds
        self.failed += other.failed
        self.claims += other.claims
        self.from_memory += other.from_memory
        self.from_older += other.from_older
        self.replayed += other.replayed


def run_chunk(dropped: Sequence[str], seeds: range) -> Total:
    """Run seeds, without some rules."""
    total, rules = Total(), without(*dropped)
    for seed in seeds:
        total.add(simulate(seed, rules))
    return total


def run_seeds(seeds: int, jobs: int, dropped: Sequence[str] = ()) -> Total:
    """Run the first `seeds` seeds in `jobs` processes."""
    total = Total()
    chunks = [range(start, min(start + _CHUNK, seeds)) for start in range(0, seeds, _CHUNK)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for part in pool.map(partial(run_chunk, dropped), chunks):
            total.merge(part)
    return total


def first_caught(rules: type[Rules], seeds: Iterable[int]) -> Outcome | None:
    """Return the first seed that fails under other rules, or None."""
    return next((found for found in (simulate(seed, rules) for seed in seeds) if found.violation), None)
