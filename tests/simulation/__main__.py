"""Many seeds: `python -m tests.simulation [--seeds N] [--jobs N] [--without RULE]`, `--show SEED`, or `--catch N`.

`--show` prints the events of one seed. `--catch` prints, for each rule, the first of N seeds that catches its absence.
"""

import argparse
import sys
import time

from tests.simulation.campaign import first_caught, run_seeds
from tests.simulation.rules import NAMES, without
from tests.simulation.simulate import simulate


def main() -> None:
    """Run, and exit with 1 if a seed fails, or if a missing rule is not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--without", action="append", default=[], choices=NAMES, help="drop a rule")
    parser.add_argument("--show", type=int, help="print the events of one seed")
    parser.add_argument("--catch", type=int, help="drop each rule in turn, and run up to this number of seeds")
    asked = parser.parse_args()
    rules = without(*asked.without)
    if asked.show is not None:
        print(simulate(asked.show, rules))
    elif asked.catch is not None:
        caught = {name: first_caught(without(name), range(asked.catch)) for name in NAMES}
        for name, outcome in caught.items():
            print(f"{name:22} {'not caught' if outcome is None else f'{outcome.seed:6}  {outcome.violation}'}")
        sys.exit(None in caught.values())
    else:
        started = time.monotonic()
        total = run_seeds(asked.seeds, asked.jobs, tuple(asked.without))
        print(*total.failed[:1], sep="\n")
        print(f"{total.seeds} seeds in {time.monotonic() - started:.0f} s, {len(total.failed)} failed")
        print(
            f"{total.claims} claims, {total.from_memory} from memory, {total.from_older} of these from an older attempt"
        )
        print("steps executed again after a single fault:", dict(sorted(total.replayed.items())))
        sys.exit(bool(total.failed))


if __name__ == "__main__":
    main()
