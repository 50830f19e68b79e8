"""A resume point is the same for the ranks that read it from a file and for the supervisor that wrote it."""

from __future__ import annotations

import json

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint, resume_point_of
from tests.memory_states import fresh_start
from tests.resume_points import memory_point

_POINTS = [fresh_start(), memory_point(sources=[("127.0.0.1", 7, [0, 2]), ("::1", 8, [1])])]


@pytest.mark.parametrize("point", _POINTS, ids=lambda point: type(point).__name__)
def test_json_of_point_is_exact(point: ResumePoint) -> None:
    """Each value has its type again: an address is a key of a mapping."""
    assert resume_point_of(json.loads(point.to_json())) == point
