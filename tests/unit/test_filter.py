from __future__ import annotations

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from catalog.errors import SpecInvalid
from catalog.row_groups import parse_filter

SCHEMA = Schema(NestedField(1, "length", LongType(), required=False))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("length > 1 length", "position 11 on: 'length'"),
        ("(length > 1", "position 11 on: its end"),
        ("length > 1 AND", "position 14 on: its end"),
    ],
)
def test_a_filter_that_cannot_be_parsed_is_pointed_at(text: str, where: str) -> None:
    """The error names the position and the text there, and does not list a grammar."""
    with pytest.raises(SpecInvalid) as caught:
        parse_filter(text, SCHEMA)
    assert where in str(caught.value)
    assert len(str(caught.value)) < 200
