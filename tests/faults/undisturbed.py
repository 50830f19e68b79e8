"""Runs that were disturbed, compared with the campaign's undisturbed run "reference": two ranks, 63 steps in a pass."""

from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import Arena, Launch

STEPS = [10, 20, 30, 40, 50, 60, 63]
"""Steps of the checkpoints of a pass."""


def check_rows_of_a_pass(campaign: Arena, run: str) -> None:
    """Check that a run of one pass has the rows of the undisturbed run in each step, and every row once."""
    reference, journal = campaign.journal("reference"), campaign.journal(run)
    assert {step: journal[step] for step in range(1, 63)} == {step: reference[step] for step in range(1, 63)}
    assert sorted(row for rows in journal.values() for row in rows) == list(range(2000))


def check_pass(campaign: Arena, run: str) -> None:
    """Check that a run of one pass has the rows and the losses of the undisturbed run."""
    check_rows_of_a_pass(campaign, run)
    assert campaign.losses(run)[:62] == campaign.losses("reference")[:62]


def check_finished(campaign: Arena, run: str, launch: Launch) -> None:
    """Check that the run finished, every checkpoint exists once, and rows and losses equal the undisturbed run's."""
    assert launch.wait() == 0, launch.stderr
    assert [row.step for row in campaign.lineage(run)] == STEPS
    assert len(campaign.rows(run, CheckpointRow)) == len(STEPS)
    check_pass(campaign, run)
