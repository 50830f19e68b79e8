"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena


@pytest.fixture(scope="module")
def dagster(campaign: Arena) -> Iterator[LocalDagster]:
    """A daemon with its code server, on the campaign's lakehouse."""
    local_dagster = LocalDagster(campaign.home)
    with local_dagster.running():
        yield local_dagster
