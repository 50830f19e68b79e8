from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "left"),
    [
        ("dlac_pipeline.launchers.serve", {"torch", "deepspeed", "dagster"}),
        ("dlac_pipeline.launchers.supervisor_process", {"pyiceberg", "pyarrow", "sqlalchemy"}),
        ("jobs.definitions", {"pyiceberg", "pyarrow", "duckdb", "numpy", "torch", "matplotlib"}),
        ("dlac_pipeline.cli.main", {"pyiceberg", "pyarrow", "duckdb", "numpy", "sqlalchemy", "torch", "dagster"}),
    ],
    ids=["a supervisor", "a supervisor before its request", "a Dagster run", "a command"],
)
def test_quick_starts_import_little(module: str, left: set[str]) -> None:
    """A supervisor begins what ranks import, which takes longest, before it imports the catalog; each Dagster run imports the
    definitions anew, and a recovery waits for that; a command's help waits for nothing.
    """
    code = f"import sys, {module}; print(sorted({left!r} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
