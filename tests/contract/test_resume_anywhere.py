"""Every reader configuration fulfills the contract."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from tests.contract.contract import Contract, Reading
from tests.contract.readings import LISTS, NULLABLE, PACKED, SCALARS, TEXTS, tokenized, transformed, transformed_packed
from tests.empty_lakehouse import empty_lakehouse

pytestmark = pytest.mark.filterwarnings("ignore:expected what is being read to leave room")
EXAMPLES, CAMPAIGN = 2, 60
LEGS = 4
KEYED = {"identity_columns": ["row_id"]}
FOLLOWS = {"follow": "appends"}
ANY_DELETE = ("delete_positions", "delete_equal")


def filtered(reading: Reading) -> Reading:
    """Return the reading with a row filter, and rows deleted before and between the legs."""
    source = {**reading.source, "row_filter": "kept = true"}
    return replace(reading, source=source, keeps=lambda row: row % 3 != 0, deletes=ANY_DELETE)


def followed(reading: Reading, *deletes: str, keyed: bool = False) -> Reading:
    """Return the reading that follows its table to appended rows."""
    source = {**reading.source, **FOLLOWS, **(KEYED if keyed else {})}
    return replace(reading, source=source, deletes=deletes or ANY_DELETE)


def mixed(reading: Reading, *sources: dict[str, float]) -> Reading:
    """Return the reading with several sources with these fields."""
    return replace(reading, mixture=sources)


ENDLESS: dict[str, float] = {"passes": 0}
READINGS: dict[str, Callable[[Path], Reading]] = {
    "lists": lambda folder: LISTS,
    "scalars": lambda folder: SCALARS,
    "texts": lambda folder: TEXTS,
    "nullable": lambda folder: NULLABLE,
    "filter and deletes": lambda folder: filtered(LISTS),
    "in table order": lambda folder: replace(filtered(LISTS), order={"shuffle": False}),
    "packed": lambda folder: PACKED,
    "packed with filter and deletes": lambda folder: filtered(PACKED),
    "tokenized": tokenized,
    "transformed": transformed,
    "transformed and packed": transformed_packed,
    "mixture": lambda folder: mixed(LISTS, {"weight": 0.7}, {"weight": 0.2, "passes": 2}, {"weight": 0.1}),
    "mixture with an endless source": lambda folder: mixed(LISTS, {"weight": 0.5}, {"weight": 0.5, **ENDLESS}),
    "endless mixture": lambda folder: replace(mixed(LISTS, ENDLESS, {"weight": 0.3, **ENDLESS}), order={"steps": 25}),
    "packed mixture with an endless source": lambda folder: mixed(PACKED, {"weight": 0.6}, ENDLESS),
    "transformed mixture with an endless source": lambda folder: mixed(transformed(folder), {"weight": 0.2}, ENDLESS),
    "packed mixture": lambda folder: mixed(PACKED, {"weight": 0.6}, {"weight": 0.4, "passes": 2}),
    "transformed mixture": lambda folder: mixed(transformed(folder), {"weight": 0.6}, {"weight": 0.4, "passes": 2}),
    "following": lambda folder: followed(LISTS),
    "following by keys": lambda folder: followed(LISTS, "delete", "delete_positions", keyed=True),
    "following, packed": lambda folder: followed(PACKED, "delete", "delete_positions", keyed=True),
    "following, transformed": lambda folder: followed(transformed(folder)),
    "following mixture": lambda folder: mixed(followed(LISTS, keyed=True), {"weight": 0.6}, {"weight": 0.4}),
    "following mixture, transformed": lambda folder: mixed(
        followed(transformed(folder)), {"weight": 0.6}, {"weight": 0.4}
    ),
    "everything": lambda folder: mixed(filtered(followed(PACKED, keyed=True)), {"weight": 0.6}, {"weight": 0.4}),
}


QUICK = ("texts", "transformed and packed", "following", "packed mixture with an endless source", "everything")
"""Together these have most parts of the reader. The campaign runs all readings."""


@pytest.mark.parametrize("name", QUICK)
def test_resume_anywhere(tmp_path: Path, name: str) -> None:
    """A run killed at any batch, with any number of ranks and any history, has the same batches, and each row once per pass."""
    _hold(tmp_path, READINGS[name](tmp_path), EXAMPLES)


@pytest.mark.soak
@pytest.mark.parametrize("name", READINGS)
def test_resume_anywhere_campaign(tmp_path: Path, name: str) -> None:
    """Many more examples are run."""
    _hold(tmp_path, READINGS[name](tmp_path), CAMPAIGN)


def _hold(folder: Path, reading: Reading, examples: int) -> None:
    numbers = count()

    # Examples take a second each. A failing one is reported as drawn, because shrinking it would take very long.
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.data())
    def example(data: st.DataObject) -> None:
        number = next(numbers)
        Contract(_lakehouse(folder / f"home-{number // 8}"), reading, data, f"t{number}").run(legs=LEGS)

    example()


@cache
def _lakehouse(home: Path) -> Lakehouse:
    """Return a lakehouse for a few examples. With many plans each is found more slowly."""
    return empty_lakehouse(home)
