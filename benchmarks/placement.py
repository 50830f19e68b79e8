"""Saving by a resume on a node that has the newest checkpoint: `python -m benchmarks.placement [--quick]`.

A run of one rank with a state of 300 MB (--quick: 32 MB) commits a checkpoint to an S3 server of this node. Then a launch
claims the run and finds its resume point (`start_attempt`). It alternates between a node with the local copy, which the
launcher prefers, and one without it, like any other node. A forwarder before the server counts the bytes from the store. The
server is a Python program on the same processors. Another store has other seconds and the same bytes.
"""

import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import yaml

import dlac_pipeline as dlac
from benchmarks.figures import Figure, report
from dlac_pipeline.checkpoint.commit.local_copies import node_name
from dlac_pipeline.extensions.clusters.cluster_job import nodes_with_newest
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.object_store import object_store

_WIDTH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resume:
    """One launch that found its resume point."""

    bytes: int
    """Bytes from the store."""
    verify_s: float
    """Seconds until the checkpoint was available with all its digests verified."""
    total_s: float
    """Seconds including the claim."""


class _Forwarder:
    """Forwards connections to a port, and counts the bytes of the answers."""

    def __init__(self, port: int) -> None:
        self.bytes = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._forward, args=(near, far, lambda size: None), daemon=True).start()
            threading.Thread(target=self._forward, args=(far, near, self._count), daemon=True).start()

    def _count(self, size: int) -> None:
        self.bytes += size

    def _forward(self, source: socket.socket, target: socket.socket, count: Callable[[int], None]) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 18):
                count(len(content))
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)


def main() -> None:
    """Measure both sides in turn, and report."""
    quick = "--quick" in sys.argv[1:]
    rounds, parameters = (3, 8_000_000) if quick else (10, 75_000_000)
    with tempfile.TemporaryDirectory(prefix="dlac-placement-") as folder:
        home = Path(folder)
        with object_store() as server:
            forwarder = _Forwarder(server.port)
            spec = _spec(home, server.properties(forwarder.url))
            lakehouse = _prepare(home, spec, parameters)
            holders = nodes_with_newest(Ledger(lakehouse).rows(spec.run, kinds=HEAD_KINDS))
            assert holders == [node_name()], holders
            held, other = [], []
            for _ in range(rounds + 1):
                held.append(_resume(lakehouse, spec, forwarder))
                other.append(_resume(lakehouse, _on_other_node(home, spec), forwarder))
        state_bytes = sum(path.stat().st_size for path in (home / "node").rglob("*") if path.is_file())
    print(json.dumps({"held": [each.total_s for each in held], "other": [each.total_s for each in other]}), flush=True)
    figures = _figures(held[1:], other[1:], state_bytes)  # the first round warms the page cache
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("placement", figures)


def _spec(home: Path, properties: dict[str, str]) -> JobSpec:
    return parse_spec(
        {
            "run": "placement",
            "source": {"table": "src.rows", "columns": ["row_id"]},
            "order": {"batch_size": 8, "key_groups": 1},
            "checkpoint": {
                **{"every_steps": 1, "mode": "synchronous", "local": str(home / "node")},
                **{"store": "s3://lake/checkpoints", "store_properties": properties},
            },
            "launch": {"script": "here.py"},
        },
        origin="the benchmark",
    ).resolved(home)


def _prepare(home: Path, spec: JobSpec, parameters: int) -> Lakehouse:
    """Commit one checkpoint with a state of `parameters` parameters, and end the run."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    lakehouse.create_namespace("src")
    table = pa.table({"row_id": pa.array(np.arange(64))})
    lakehouse.catalog.create_table("src.rows", table.schema).append(table)
    job = home / "job.yaml"
    job.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    os.environ["DLAC_HOME"] = str(home)
    with dlac.training_run(job) as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(_WIDTH, parameters // _WIDTH)))
        for batch in run.batches():
            if batch.step > 1:
                break
            run.step_done(torch.tensor(0.0))
    return lakehouse


def _on_other_node(home: Path, spec: JobSpec) -> JobSpec:
    """Return the spec with a local folder that has no copy."""
    local = home / "other-node"
    shutil.rmtree(local, ignore_errors=True)
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"local": str(local)})})


def _resume(lakehouse: Lakehouse, spec: JobSpec, forwarder: _Forwarder) -> _Resume:
    before, started = forwarder.bytes, time.perf_counter()
    point = start_attempt(Plans(lakehouse), spec, ClaimRequest())
    total_s = time.perf_counter() - started
    assert point.step == 1
    return _Resume(bytes=forwarder.bytes - before, verify_s=point.verify_s, total_s=total_s)


def _figures(held: Sequence[_Resume], other: Sequence[_Resume], state_bytes: int) -> dict[str, Figure]:
    ratios = [mine.total_s / theirs.total_s for mine, theirs in zip(held, other, strict=True)]
    figures = {"state_bytes": Figure(value=state_bytes, unit="bytes")}
    for name, side in (("preferred", held), ("other", other)):
        same = [later.total_s / first.total_s for first, later in pairwise(side)]
        figures |= {
            f"{name}_bytes_from_store": Figure(value=statistics.median(each.bytes for each in side), unit="bytes"),
            f"{name}_verify_s": Figure(value=statistics.median(each.verify_s for each in side), unit="s"),
            f"{name}_claim_to_resume_point_s": Figure(value=statistics.median(each.total_s for each in side), unit="s"),
            f"{name}_same_side_ratio": Figure(value=statistics.median(same), unit="ratio"),
            f"{name}_same_side_spread": Figure(value=_spread(same), unit="ratio"),
        }
    share = max(each.bytes for each in held) / state_bytes
    return figures | {
        "preferred_share_of_state": Figure(value=100 * share, unit="%", bar="<= 0.1"),
        "preferred_over_other": Figure(value=statistics.median(ratios), unit="ratio", bar="<= 1"),
        "preferred_over_other_spread": Figure(value=_spread(ratios), unit="ratio"),
    }


def _spread(values: Sequence[float]) -> float:
    """Return the interquartile range, or 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


if __name__ == "__main__":
    main()
