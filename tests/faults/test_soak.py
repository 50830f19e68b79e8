"""Short campaigns: every kind of fault under a real Dagster, pairs of features, and the demo on real servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak_faults.choosing import KINDS
from tests.postgres_server import needs_postgres
from tests.seaweedfs import needs_seaweedfs


def run_module(*command: str) -> str:
    """Run a module, which must succeed, and return the end of its output."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    output = f"{done.stdout[-4000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, output
    return output


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_every_fault_kind_is_healed(tmp_path: Path) -> None:
    """All runs finish, exact and with the losses of a run without faults. No process, lock, folder or file remains."""
    out = tmp_path / "soak.json"
    output = run_module("benchmarks.soak", "--quick", "--out", str(out))
    campaign = json.loads(out.read_text())
    assert {fault["kind"] for fault in campaign["faults"]} == KINDS.keys() - campaign["skipped"]
    assert sum(fault["summary"]["quarantined"] for fault in campaign["faults"]) == 2, output
    assert not any(campaign["left"].values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_combinations_agree_with_their_logs() -> None:
    """Rows, digests, audit and what follows equal the training script's log."""
    pytest.importorskip("torchft")
    run_module("benchmarks.pairs", "--quick")


@needs_seaweedfs
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["seaweedfs", pytest.param("postgres", marks=needs_postgres)])
def test_demo_holds_on_servers(tmp_path: Path, kind: str) -> None:
    """Both runs are exact, and bit-identical. No table and no checkpoint of the store is on this node."""
    places = ["--home", str(tmp_path / "home"), "--report", str(tmp_path / "report")]
    run_module("tests.served_lakehouses", kind, *places)
    assert not (tmp_path / "home" / "catalog.db").exists()
    assert not (tmp_path / "home" / "warehouse").exists()
