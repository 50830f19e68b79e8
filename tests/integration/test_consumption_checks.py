"""The consumption audit as Dagster checks: a tampered ledger fails the check that names its kind of contradiction."""

import dagster as dg
import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from tests.dagster_runs import evaluate_checks
from tests.fixtures import Lake
from tests.integration.audit_runs import Change, doubled, is_advance, without

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
CHECKS = ("no_duplicate_rows", "no_missing_rows", "consumption_exact")


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (doubled, {"no_duplicate_rows", "consumption_exact"}),
        pytest.param(
            without(lambda row: is_advance(row) and row["step"] == 8),
            {"no_missing_rows", "consumption_exact"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["repeated advance", "missing advances"],
)
def test_tampered_ledger_fails_its_check(lake: Lake, change: Change, failed: set[str]) -> None:
    """Every failed check is an error, and its SQL returns the offending rows."""
    run = lake.forge(change)
    results = evaluate_checks(lake.spec(run))
    del results["checkpoint_restorable"]
    assert tuple(results) == CHECKS
    assert {result.check_name for result in results.values() if not result.passed} == failed
    assert {result.severity for result in results.values()} == {dg.AssetCheckSeverity.ERROR}
    with open_audit(lake.lakehouse, run=run) as connection:
        for name, result in results.items():
            query = str(result.metadata["sql"].value).removeprefix("```sql\n").removesuffix("\n```")
            assert bool(connection.execute(query).fetchall()) == (name in failed), (name, query)
