"""The demo on real servers, as `make demo-on-seaweedfs` and `make demo-on-postgres` run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres_server import needs_postgres
from tests.seaweedfs import needs_seaweedfs


@needs_seaweedfs
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["seaweedfs", pytest.param("postgres", marks=needs_postgres)])
def test_demo_holds_on_servers(tmp_path: Path, kind: str) -> None:
    """Both runs are exact, and bit-identical. No table and no checkpoint of the store is on this node."""
    places = ["--home", str(tmp_path / "home"), "--report", str(tmp_path / "report")]
    command = [sys.executable, "-m", "tests.served_lakehouses", kind, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not (tmp_path / "home" / "catalog.db").exists()
    assert not (tmp_path / "home" / "warehouse").exists()
