"""torchtitan itself, where it is installed: `pip install torchtitan==0.3.0 triton`."""

import os
import signal

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import Arena

pytest.importorskip("torchtitan")


def spec(arena: Arena, run: str, ranks: int, tensors: int) -> JobSpec:
    """Return the spec of a run on a mesh."""
    raw = {
        "run": run,
        "source": {"table": "src.titan", "columns": ["row_id", "tokens"]},
        "order": {"batch_size": 16, "key_groups": 4, "seed": 5},
        "checkpoint": {"every_steps": 5},
        "launch": {"script": str(arena.program("train_torchtitan.py")), "world_size": ranks, "mesh": {"tp": tensors}},
        "params": {"journal": str(arena.home / "journal")},
    }
    return parse_spec(raw, origin="the test").resolved(arena.home)


@pytest.mark.slow
def test_torchtitan_leaves_its_mesh(arena: Arena) -> None:
    """Its trainer loses a rank of tensor parallelism, and continues with other degrees. Rows and losses are those of one mesh."""
    ids = np.random.default_rng(3).integers(0, 200, (640, 17)).astype(np.int32)
    rows = pa.table({"row_id": np.arange(640), "tokens": pa.array(list(ids), pa.list_(pa.int32()))})
    arena.lakehouse.catalog.create_table("src.titan", rows.schema).append(rows)
    arena.launched(spec(arena, "calm", 4, 2))  # another mesh begins with other weights
    for ranks, tensors in ((4, 2), (2, 1)):
        launch = arena.launch(spec(arena, "moved", ranks, tensors))
        launch.wait_for("checkpoint", 1)
        os.kill(launch.ranks()[1].pid, signal.SIGKILL)
        if tensors == 2:
            launch.wait_for("checkpoint", 3)
            launch.destroy()
        else:
            assert launch.wait() == 0, launch.of("error")
    assert arena.journal("moved") == arena.journal("calm")
    assert arena.losses("moved") == pytest.approx(arena.losses("calm"), rel=1e-4)
    assert audit_run(arena.lakehouse, "moved").exact
