"""Combinations of features under a fault: `python -m benchmarks.pairs [--seed N] [--combinations N] [--quick] [--only TEXT]`.

A combination has one value of each factor: engine, states in memory, ranks, source, origin of the run, extras, fault, and what is
done then. The list covers each pair of values that exists, and then random combinations. In each one real `dlac train`
processes are hit by a real fault. The training script logs rows and digests of its state by itself, and that log judges: each
live row once per pass, a chain of digests over all attempts, the audit, and the operation that follows.

A wrong combination is tried with one factor after the other at its simplest value, and what remains is printed.
`--only` tries the combinations whose text contains all words of TEXT. Full stores and full memory need root.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, report
from benchmarks.pairs_lab import factors
from benchmarks.pairs_lab.course import try_combination, why_skipped
from benchmarks.pairs_lab.factors import Combination
from benchmarks.pairs_lab.scene import IMPORTED_BY_INITIALIZE
from dlac_pipeline.extensions.replicas.rank import SETTINGS
from tests.forked import MORE_IMPORTS, fork_the_fork_server


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A combination and its result."""

    combination: Combination
    wrong: str
    """What is wrong with it, or empty."""
    skipped: str | None


def main() -> None:
    """Try the combinations, reduce wrong ones, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--combinations", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="A few chosen combinations.")
    parser.add_argument("--only", default="", help="Words that the text of a combination contains.")
    parser.add_argument("--jobs", type=int, default=2, help="Combinations at a time.")
    parser.add_argument("--keep", type=Path, help="Folder for the lakehouses of wrong combinations.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first combination of the list.")
    chosen = parser.parse_args()
    listed = factors.quick_list() if chosen.quick else factors.draw(chosen.seed, chosen.combinations)
    listed = [
        each for each in listed[chosen.first :] if all(word in factors.text_of(each) for word in chosen.only.split())
    ]
    os.environ[MORE_IMPORTS] = f"deepspeed,{IMPORTED_BY_INITIALIZE},torchft,safetensors.torch"
    os.environ |= {"DS_ACCELERATOR": "cpu", **SETTINGS}  # torchft, which is imported once for all, reads RUST_LOG then
    fork_the_fork_server()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        tried = list(pool.map(lambda each: _try(each, chosen.seed, chosen.keep), listed))
    wrong = [each for each in tried if each.wrong]
    for each in wrong:
        _print_reduced(each.combination, chosen.seed)
    done = [each for each in tried if each.skipped is None]
    covered = {pair for each in done for pair in factors.pairs_of(each.combination)}
    figures = {
        "combinations": Figure(value=len(done), unit="combinations"),
        "wrong": Figure(value=len(wrong), unit="combinations", bar="<= 0"),
        "pairs_covered": Figure(value=len(covered), unit="pairs"),
        "pairs": Figure(value=len(factors.valid_pairs()), unit="pairs"),
        "skipped": Figure(value=len(tried) - len(done), unit="combinations"),
    }
    report("pairs", figures)
    sys.exit(bool(wrong))


def _try(combination: Combination, seed: int, keep: Path | None) -> Tried:
    """Try a combination, and print a line."""
    skipped, began = why_skipped(combination), time.monotonic()
    wrong = "" if skipped else try_combination(combination, seed, keep=keep)
    outcome = f"skipped, {skipped}" if skipped else "WRONG" if wrong else "right"
    print(f"{outcome} in {time.monotonic() - began:.1f} s: {factors.text_of(combination)}", flush=True)
    if wrong:
        print(wrong, flush=True)
    return Tried(combination=combination, wrong=wrong, skipped=skipped)


def _print_reduced(combination: Combination, seed: int) -> None:
    """Print the values without which a wrong combination is right."""
    if not try_combination(combination, seed):
        print(f"right when repeated: {factors.text_of(combination)}", flush=True)
        return
    left = factors.reduce(combination, lambda each: bool(try_combination(each, seed)))
    print(f"remains: {factors.what_remains(left)}", flush=True)


if __name__ == "__main__":
    main()
