"""All tests of this folder stay in their process."""

import pytest


@pytest.fixture(autouse=True)
def _isolated(only_this_process: None) -> None:
    """Fail a test that starts a process, opens a socket or sleeps."""
