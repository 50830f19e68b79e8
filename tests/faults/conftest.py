"""Fixtures of the fault tests."""

from collections.abc import Iterator

import pytest

from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena


@pytest.fixture(scope="module")
def dagster(request: pytest.FixtureRequest, campaign: Arena) -> Iterator[LocalDagster]:
    """A daemon on the campaign's lakehouse, whose code server defines the training runs of the module's `RUNS`."""
    local_dagster = LocalDagster(campaign.home)
    for run, changes in request.module.RUNS.items():
        local_dagster.write_job_file(campaign.spec(run, **changes))
    with local_dagster.running():
        yield local_dagster
