"""Groups of tests that one process runs."""

from __future__ import annotations

from tests.scheduling import group_of


def test_shared_lakehouse_is_one_group() -> None:
    """Modules that share a trained lakehouse are in one group. Any other module is a group of its own."""
    assert (
        group_of("tests/integration/test_audit.py") == group_of("tests/integration/test_audit_tampering.py") == "lake"
    )
    assert group_of("tests/unit/test_scheduling.py") == "tests/unit/test_scheduling.py"
