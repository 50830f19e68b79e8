"""Factors of a combination, the combinations that exist, a list that covers all pairs of values, and its reduction."""

import random
from collections.abc import Callable, Mapping
from itertools import combinations, product

Combination = Mapping[str, str]
"""Factor -> value."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two values of different factors, in the order of the factors."""

FACTORS: dict[str, tuple[str, ...]] = {
    "engine": ("torch", "dcp", "zero1", "zero2", "zero3", "trainer"),
    "memory": ("off", "on", "full"),
    "ranks": ("one", "two", "replicas"),
    "source": ("counted", "packed", "transformed", "mixed", "followed", "late"),
    "origin": ("fresh", "adopted", "forked", "rewound", "resized"),
    "extras": ("none", "row_keys", "listeners", "secrets"),
    "fault": (
        "rank killed",
        "killed again",
        "all killed",
        "SIGTERM",
        "SIGTERM after recovery",
        "store full",
        "catalog away",
    ),
    "then": ("audit", "rows", "seen", "forget", "rebuild", "export"),
}
"""Factor -> values, the simplest one first."""
_QUICK = (
    ("torch", "on", "two", "counted", "resized", "row_keys", "killed again", "seen"),
    ("dcp", "on", "two", "mixed", "adopted", "none", "SIGTERM after recovery", "audit"),
    ("trainer", "off", "two", "packed", "forked", "secrets", "all killed", "rows"),
    ("torch", "off", "replicas", "late", "fresh", "listeners", "rank killed", "export"),
    ("torch", "on", "one", "followed", "rewound", "none", "SIGTERM", "forget"),
    ("torch", "on", "one", "transformed", "fresh", "secrets", "catalog away", "rebuild"),
)
_TRIES = 40
"""Random combinations of which the one with most new pairs is taken."""


def quick_list() -> list[Combination]:
    """Return the few combinations of the quick set."""
    return [dict(zip(FACTORS, values, strict=True)) for values in _QUICK]


def is_valid(combination: Combination) -> bool:
    """Return True if DLAC supports the combination, by its documentation."""
    engine, ranks, source = combination["engine"], combination["ranks"], combination["source"]
    if ranks == "replicas" and (engine not in ("torch", "dcp") or source in ("packed", "transformed")):
        return False  # docs/extensions/replicas.md
    if combination["origin"] == "adopted" and engine != "dcp":
        return False  # weights of a pretrained model begin a run with DistributedState
    if combination["then"] == "export" and engine == "trainer":
        return False  # the trainer's files are its own
    return combination["then"] != "seen" or combination["extras"] == "row_keys"


def pairs_of(combination: Combination) -> set[Pair]:
    """Return the pairs of values in a combination."""
    return set(combinations(((name, combination[name]) for name in FACTORS), 2))


def valid_pairs() -> set[Pair]:
    """Return each pair of values that some valid combination has."""
    found: set[Pair] = set()
    names = [name for name in FACTORS if name not in ("memory", "fault")]  # which `is_valid` does not ask
    for values in product(*(FACTORS[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        if is_valid(chosen):
            found.update(combinations(chosen.items(), 2))
    free = {(name, value) for name in ("memory", "fault") for value in FACTORS[name]}
    others = {one for pair in found for one in pair}
    order = list(FACTORS)
    for one, other in combinations(free | others, 2):
        if one[0] != other[0] and ({one, other} & free):
            first, second = sorted((one, other), key=lambda each: order.index(each[0]))
            found.add((first, second))
    return found


def draw(seed: int, count: int) -> list[Combination]:
    """Return `count` valid combinations, of which the first ones cover as many pairs as they can."""
    chance, missing = random.Random(seed), valid_pairs()
    chosen: list[Combination] = []
    while len(chosen) < count:
        best = _best(chance, missing) if missing else _fill({}, chance)
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def _best(chance: random.Random, missing: set[Pair]) -> Combination:
    """Return the one of some combinations with a missing pair that has most of them."""
    wanted = chance.choice(sorted(missing))
    tries = [_fill(dict(wanted), chance) for _ in range(_TRIES)]
    return max(tries, key=lambda each: len(missing & pairs_of(each)))


def _fill(given: dict[str, str], chance: random.Random) -> Combination:
    """Return a random valid combination with the given values."""
    while True:
        found = {name: given.get(name) or chance.choice(values) for name, values in FACTORS.items()}
        if is_valid(found):
            return found


def reduce(combination: Combination, fails: Callable[[Combination], bool]) -> Combination:
    """Return a combination that still fails, with as few factors as possible at other values than the simplest ones."""
    for name, values in FACTORS.items():
        changed = {**combination, name: values[0]}
        if changed != combination and is_valid(changed) and fails(changed):
            combination = changed
    return combination


def text_of(combination: Combination) -> str:
    """Return the values of a combination in one line."""
    return ", ".join(combination[name] for name in FACTORS)


def what_remains(combination: Combination) -> str:
    """Return the values that are not the simplest ones."""
    left = [f"{name}={combination[name]}" for name, values in FACTORS.items() if combination[name] != values[0]]
    return " x ".join(left) or "nothing but the simplest values"
