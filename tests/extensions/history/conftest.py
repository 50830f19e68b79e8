"""Fixtures of the tests of histories."""

from pathlib import Path

import pytest

from tests.extensions.history.history_lake import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty table."""
    return Lake(tmp_path / "home").create("src.t")
