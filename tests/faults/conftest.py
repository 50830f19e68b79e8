"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena


@pytest.fixture(scope="module")
def dagster(campaign: Arena) -> Iterator[LocalDagster]:
    """A daemon with its code server, on the campaign's lakehouse."""
    made = LocalDagster(campaign.home)
    with made.running():
        yield made
