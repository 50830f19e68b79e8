import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dlac_pipeline.lakehouse.errors import FormatTooNew, ResumeMismatch
from dlac_pipeline.plan.legs.leg import CHANGEABLE, Leg
from tests.legs import leg_of

LEG = leg_of()


def with_source(**changes: Any) -> Leg:
    """Return the leg with some changed fields of its source."""
    return replace(LEG, sources=(replace(LEG.sources[0], **changes),))


def test_json_round_trip_keeps_every_bit() -> None:
    """A leg read from the ledger equals the written one, with its large integers and text."""
    assert Leg.from_json(LEG.to_json()) == LEG


@pytest.mark.parametrize("version", ["format_version", "order_version"])
@pytest.mark.parametrize(("number", "advice"), [(99, "upgrade"), (0, "an older DLAC")])
def test_leg_of_another_version_is_refused(version: str, number: int, advice: str) -> None:
    """A leg of another format or order is refused. The message names the DLAC version that reads it."""
    text = json.dumps({**json.loads(LEG.to_json()), version: number})
    with pytest.raises(FormatTooNew, match=rf"{version} \d+ of a leg, found {number}.*{advice}"):
        Leg.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("seed", 5), ("key_groups", 8), ("batch_size", 16), ("block_slices", 3), ("shuffle", False)],
        *[("plan_id", "p2"), ("table_uuid", "u2"), ("snapshot_id", 7), ("schema_id", 1), ("columns", ("x",))],
        *[("row_filter", ""), ("exclude", ("x = 1",)), ("weight", 0.5), ("passes", 3), ("transform", "digest")],
    ],
)
def test_each_difference_is_named(name: str, value: Any) -> None:
    """No bound field of a leg or a source changes unnoticed: the error names it, both values, and a new leg if it helps."""
    holder, change = (LEG, partial(replace, LEG)) if hasattr(LEG, name) else (LEG.sources[0], with_source)
    with pytest.raises(ResumeMismatch) as caught:
        LEG.check_same(change(**{name: value}))
    assert f"{name}: committed {getattr(holder, name)!r}, asked for {value!r}" in str(caught.value)
    assert ("--new-leg" in str(caught.value)) == (name in CHANGEABLE)


def test_start_and_name_may_differ() -> None:
    """A renamed table is the same table. A spec does not have to know a leg's number or first step."""
    LEG.check_same(with_source(table="src.renamed", name="src.renamed"))
    LEG.check_same(replace(LEG, index=3, start_step=70))
