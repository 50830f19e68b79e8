"""Groups of tests that one process runs."""

from __future__ import annotations

from pathlib import Path

from tests.scheduling import group_of


def test_shared_lakehouse_is_one_group() -> None:
    """Modules that share a trained lakehouse are in one group. Any other module is a group of its own."""
    assert (
        group_of("tests/integration/test_audit.py") == group_of("tests/integration/test_audit_tampering.py") == "lake"
    )
    assert group_of("tests/unit/test_scheduling.py") == "tests/unit/test_scheduling.py"


def test_campaign_modules_are_two_groups() -> None:
    """Their tests take long, so they are spread over a few processes, each of which trains the reference run once."""
    modules = sorted((Path(__file__).parents[1] / "faults").glob("test_*.py"))
    groups = {group_of(f"tests/faults/{path.name}") for path in modules}
    assert {group for group in groups if group.startswith("campaign")} == {f"campaign {n}" for n in range(2)}
