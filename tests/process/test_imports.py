import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        pytest.param(
            "dlac_pipeline.extensions.clusters.serve", {"torch", "deepspeed", "dagster"}, marks=pytest.mark.slow
        ),
        ("dlac_pipeline.extensions.clusters.supervisor_process", {"pyiceberg", "pyarrow", "sqlalchemy"}),
        pytest.param(
            "jobs.definitions",
            {"pyiceberg", "pyarrow", "duckdb", "numpy", "torch", "matplotlib"},
            marks=pytest.mark.slow,
        ),
        (
            "dlac_pipeline.extensions.look.run_state, dlac_pipeline.extensions.look.goodput",
            {
                *("torch", "dagster", "sqlglot", "requests", "matplotlib", "pandas"),
                "fsspec",
                "dlac_pipeline.spec.job_spec",
            },
        ),
        (
            "dlac_pipeline.cli.main",
            {"pydantic", "yaml", "pyiceberg", "pyarrow", "duckdb", "numpy", "sqlalchemy", "torch", "dagster"},
        ),
        pytest.param(
            "dlac_pipeline.extensions.dataset",
            {"deepspeed", "dagster", "transformers", "accelerate", "torchdata"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a supervisor", "a supervisor before its request", "a Dagster run", "a status", "a command", "a dataset"],
)
def test_quick_starts_import_little(module: str, unwanted: set[str]) -> None:
    """Commands, supervisors, ranks and Dagster runs, for which a person or a recovery waits, leave out slow imports."""
    code = f"import sys, {module}; print(sorted({unwanted!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
