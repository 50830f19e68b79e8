"""The GPT of examples/mesh on the devices of the node, with a rank killed in the middle, and undisturbed."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure
from benchmarks.gpu_parts.identity import losses_of, train_and_kill
from benchmarks.gpu_parts.node import MeasuredNode
from benchmarks.gpu_parts.sizes import Sizes
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.look.losses import differing_steps
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SCRIPT = Path(__file__).parents[2] / "examples" / "mesh" / "train.py"
_ROWS, _LENGTH, _BATCH = 960, 65, 16


def measure_mesh(home: Path, node: MeasuredNode, sizes: Sizes) -> dict[str, Figure]:
    """Train twice, and compare the losses, which differ by rounding where kernels are not deterministic."""
    lakehouse = connect(LakehouseConfig().at_home(home), create=True)
    lakehouse.create_namespace("src")
    tokens = np.random.default_rng(5).integers(0, int(sizes.mesh["vocabulary"]), (_ROWS, _LENGTH), dtype=np.int32)
    rows = pa.table({"tokens": pa.array(list(tokens), pa.list_(pa.int32()))})
    properties = {"write.parquet.row-group-limit": "60"}
    lakehouse.catalog.create_table("src.tokens", rows.schema, properties=properties).append(rows)
    Supervisor(Request(spec=_spec(home, node, sizes, "calm"))).run()
    recovered = train_and_kill(_spec(home, node, sizes, "killed"), at_step=_ROWS // _BATCH // 2)
    calm, killed = (losses_of(lakehouse, run) for run in ("calm", "killed"))
    largest = max(abs(one - two) / abs(one) for one, two in zip(calm.losses, killed.losses, strict=True))
    return {
        "mesh_ranks": Figure(value=node.ranks, unit="ranks"),
        "mesh_ranks_of_a_replica": Figure(value=_mesh(node.ranks)["tp"] * _mesh(node.ranks)["pp"], unit="ranks"),
        "mesh_recoveries": Figure(value=len(recovered), unit="recoveries", bar=">= 1"),
        "mesh_differing_losses": Figure(value=len(differing_steps(calm, killed)), unit="steps"),
        "mesh_largest_loss_difference": Figure(value=largest, unit="ratio", bar="<= 1e-3"),
        "mesh_runs_not_exact": Figure(
            value=sum(not audit_run(lakehouse, run).exact for run in ("calm", "killed")), unit="runs", bar="<= 0"
        ),
    }


def _mesh(ranks: int) -> dict[str, int]:
    return {"tp": 1 if ranks % 2 else 2, "pp": 1 if ranks % 4 else 2}


def _spec(home: Path, node: MeasuredNode, sizes: Sizes, run: str) -> JobSpec:
    raw = {
        "run": run,
        "source": {"table": "src.tokens", "columns": ["tokens"]},
        "order": {"batch_size": _BATCH, "seed": 3},
        "checkpoint": {"every_steps": 5},
        "launch": {
            "script": str(_SCRIPT),
            "world_size": node.ranks,
            "mesh": _mesh(node.ranks),
            "env": node.environment,
        },
        "params": sizes.mesh,
    }
    return parse_spec(raw, origin="the benchmark").resolved(home)
