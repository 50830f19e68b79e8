"""The demo's training with a rank killed in the middle, and undisturbed: losses compared bit by bit."""

import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.gpu_parts.node import EXAMPLE, PROGRAMS, MeasuredNode
from benchmarks.gpu_parts.sizes import Sizes
from dlac_pipeline.audit.audit import audit_run, open_run
from dlac_pipeline.extensions.look.losses import LossCurve, differing_steps, read_losses
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec, read_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor
from examples.corpus.corpus import ingest_stdlib_corpus
from examples.corpus.tokens import tokenize_corpus
from examples.demo.live_run import LiveRun

_KILL_AT = 0.5
"""Share of the run's steps after which a rank is killed."""
_LOOK_S = 0.01


def measure_identity(home: Path, node: MeasuredNode, sizes: Sizes, *, kernels: str) -> dict[str, Figure]:
    """Train twice, with kernels that are "deterministic", or with PyTorch's "default" ones."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    ingest_stdlib_corpus(lakehouse, appends=1, root=Path(sysconfig.get_path("stdlib")) / sizes.corpus)
    tokenize_corpus(lakehouse, tokenizer_path=home / "tokenizer.json", rows_per_row_group=64, appends=1)
    reference, faulty = (f"{kernels}-{which}" for which in ("reference", "faulty"))
    Supervisor(Request(spec=_spec(home, node, sizes, reference, kernels))).run()
    expected = losses_of(lakehouse, reference)
    recovered = train_and_kill(_spec(home, node, sizes, faulty, kernels), at_step=int(_KILL_AT * len(expected.losses)))
    audits = [audit_run(lakehouse, run) for run in (reference, faulty)]
    differing = differing_steps(expected, losses_of(lakehouse, faulty))
    bar = "<= 0" if kernels == "deterministic" else None
    return {
        f"demo_steps_{kernels}": Figure(value=len(expected.losses), unit="steps", bar=">= 1"),
        f"demo_recoveries_{kernels}": Figure(value=len(recovered), unit="recoveries", bar=">= 1"),
        f"demo_differing_losses_{kernels}": Figure(value=len(differing), unit="steps", bar=bar),
        f"demo_runs_not_exact_{kernels}": Figure(
            value=sum(not audit.exact for audit in audits), unit="runs", bar="<= 0"
        ),
        f"demo_recovery_s_{kernels}": Figure(
            value=max((one["recovered_s"] for one in recovered), default=0.0), unit="s"
        ),
    }


def _spec(home: Path, node: MeasuredNode, sizes: Sizes, run: str, kernels: str) -> JobSpec:
    raw = read_spec(EXAMPLE / "job.toml").model_dump()
    raw["run"] = run
    raw["order"] |= {"batch_size": sizes.demo_batch}
    raw["checkpoint"] |= {"every_steps": sizes.demo_every_steps}
    environment = {name: value for name, value in raw["launch"]["env"].items() if name != "DS_ACCELERATOR"}
    if kernels == "deterministic":
        environment |= {"DETERMINISTIC": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    raw["launch"] |= {
        "script": str(PROGRAMS / "gpu_demo.py"),
        "world_size": node.ranks,
        "env": {**environment, **node.environment},
    }
    return parse_spec(raw, origin="the benchmark").resolved(home)


def train_and_kill(spec: JobSpec, *, at_step: int) -> list[dict[str, Any]]:
    """Train to the end, with SIGKILL for the last rank at a step, and return the events of the recoveries."""
    recovered: list[dict[str, Any]] = []
    failed: list[BaseException] = []
    live = LiveRun(spec.checkpoint.local, spec.run)

    def record(event: dict[str, Any]) -> None:
        if event["event"] == "recovered":
            recovered.append(event)

    def train() -> None:
        try:
            Supervisor(Request(spec=spec), on_event=record).run()
        except BaseException as err:
            failed.append(err)

    thread = threading.Thread(target=train)
    thread.start()
    while thread.is_alive() and not (live.step() >= at_step and live.kill_rank(spec.launch.world_size - 1)):
        time.sleep(_LOOK_S)
    thread.join()
    if failed:
        raise failed[0]
    return recovered


def losses_of(lakehouse: Lakehouse, run: str) -> LossCurve:
    """Return the losses of a run."""
    with open_run(lakehouse, run) as connection:
        return read_losses(connection, run)
