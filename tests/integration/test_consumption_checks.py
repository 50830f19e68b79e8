"""The consumption audit as Dagster checks: a tampered ledger fails the check that names its kind of contradiction."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.dagster.assets.checks import consumption_audit
from dlac_pipeline.dagster.resources import JobResource
from dlac_pipeline.dagster.sensors.continual import run_config_of
from tests.integration.audit_runs import Change, is_advance, rows_named, unchanged, without
from tests.integration.conftest import Lake

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
CHECKS = ("no_duplicate_rows", "no_missing_rows", "consumption_exact")


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (unchanged, set()),
        (lambda rows: [*rows, rows_named(rows, "advance")[3]], {"no_duplicate_rows", "consumption_exact"}),
        (without(lambda row: is_advance(row) and row["step"] == 8), {"no_missing_rows", "consumption_exact"}),
        (without(lambda row: row["kind"] == "leg"), {"consumption_exact"}),
    ],
    ids=["intact", "repeated advance", "missing advances", "missing leg"],
)
def test_tampered_ledger_fails_its_check(lake: Lake, change: Change, failed: set[str]) -> None:
    """Every failed check is an error, and its SQL returns the offending rows."""
    run = lake.forge(change)
    results = checked(lake, run)
    assert {result.check_name for result in results.values() if not result.passed} == failed
    assert {result.severity for result in results.values()} == {dg.AssetCheckSeverity.ERROR}
    with open_audit(lake.lakehouse, run=run) as connection:
        for name, result in results.items():
            query = str(result.metadata["sql"].value).removeprefix("```sql\n").removesuffix("\n```")
            assert bool(connection.execute(query).fetchall()) == (name in failed), (name, query)


def checked(lake: Lake, run: str) -> dict[str, dg.AssetCheckResult]:
    """Return the result of each check on a run, by name."""
    spec = lake.spec(run)
    resource = JobResource(spec=run_config_of(spec)["resources"]["job"]["config"]["spec"])
    results = consumption_audit(dg.build_asset_check_context(), resource)
    assert isinstance(results, Iterator)
    found = {str(result.check_name): result for result in results}
    assert tuple(found) == CHECKS
    return found
