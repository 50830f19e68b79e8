"""One asset check for many rehearsals: what makes it fail, and what it says."""

from __future__ import annotations

import dagster as dg
import pytest

from dlac_pipeline.dagster.assets.rehearsal import RehearsedRun, judge_rehearsals

SAME = RehearsedRun(
    run="same", holds=True, said="20 losses bit-identical", facts={"checkpoint_id": "c-1", "compared": 20}
)
OTHER = RehearsedRun(
    run="other", holds=False, said="2 of 20 losses differ", facts={"checkpoint_id": "c-2", "compared": 20}
)
NONE = RehearsedRun(run="none", holds=None, said="expected a checkpoint that has a successor")
ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN


@pytest.mark.parametrize(
    ("outcomes", "passed", "severity", "said"),
    [
        ([SAME], True, WARN, "same: 20 losses bit-identical"),
        ([SAME, NONE], True, WARN, "same: 20 losses bit-identical"),
        ([SAME, OTHER, NONE], False, ERROR, "other: 2 of 20 losses differ"),
        ([NONE], False, WARN, "none: expected a checkpoint that has a successor"),
        ([], False, WARN, "there was no run to rehearse"),
    ],
)
def test_differing_rehearsal_fails_check(
    outcomes: list[RehearsedRun], passed: bool, severity: dg.AssetCheckSeverity, said: str
) -> None:
    """The description is of those that matter; the table has all of them, with the same columns."""
    result = judge_rehearsals(outcomes)
    assert (result.passed, result.severity, result.description) == (passed, severity, said)
    records = result.metadata["rehearsals"].value.records if outcomes else []  # type: ignore[union-attr]  # a table
    assert [record.data["run"] for record in records] == [each.run for each in outcomes]
