"""Passports of exported weights: `python -m benchmarks.passport [--quick]`.

One rank trains on a table of a million documents with keys, once each. Its weights are exported with their passport. Every
document is asked for by its key, and as many that were never in the table. 200 questions are asked, as in `dlac passport check`.
"""

import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import yaml

import dlac_pipeline as dlac
from benchmarks.figures import Figure, report
from dlac_pipeline.audit.lakehouse_sql import sql_script
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.erasure.passport import OpenPassport, passport_of, write_passport
from dlac_pipeline.extensions.exchange.export import export_weights
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

_PROBES = 200
_BATCH = 8192


def main() -> None:
    """Train, export, ask, and report."""
    documents = 100_000 if "--quick" in sys.argv[1:] else 1_000_000
    with tempfile.TemporaryDirectory(prefix="dlac-passport-") as folder:
        figures = _measure(Path(folder), documents)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("passport", figures)


def _measure(home: Path, documents: int) -> dict[str, Figure]:
    lakehouse = connect(LakehouseConfig().at_home(home), create=True)
    lakehouse.create_namespace("src")
    rows = pa.table({"doc_id": [f"doc-{row}" for row in range(documents)], "x": np.zeros(documents, dtype=np.float32)})
    lakehouse.catalog.create_table("src.documents", rows.schema).append(rows)
    spec = _spec(home)
    _train(home, spec)
    started = time.perf_counter()
    exported = export_weights(lakehouse, tiers_of(spec), home / "weights.safetensors")
    exported_at = time.perf_counter()
    passport = write_passport(lakehouse, exported.path)
    written_at = time.perf_counter()
    assert passport is not None, "expected a passport"
    with closing(OpenPassport(exported.path)) as opened:
        [identity] = opened.facts.identities
        missed = int((~opened.has_keys(_keys_of(*identity, "doc-", documents))).sum())
        found = int(opened.has_keys(_keys_of(*identity, "other-", documents)).sum())
        times = []
        for probe in range(_PROBES):
            asked = time.perf_counter()
            assert opened.has([f"doc-{probe * documents // _PROBES}"])
            times.append(time.perf_counter() - asked)
    opened_at = time.perf_counter()
    with closing(OpenPassport(exported.path)):
        open_ms = 1000 * (time.perf_counter() - opened_at)
    return {
        "documents": Figure(value=passport.documents, unit="documents", bar=f">= {documents}"),
        "bits_per_document": Figure(
            value=8 * passport_of(exported.path).stat().st_size / documents, unit="bits", bar="<= 10"
        ),
        "false_negatives": Figure(value=missed, unit=f"of {documents}", bar="<= 0"),
        "false_positives": Figure(value=100 * found / documents, unit="%", bar="<= 0.5"),
        "question_p50": Figure(value=1000 * statistics.median(times), unit="ms", bar="<= 50"),
        "question_p95": Figure(value=1000 * statistics.quantiles(times, n=20)[-1], unit="ms", bar="<= 50"),
        "opened": Figure(value=open_ms, unit="ms"),
        "written": Figure(value=written_at - exported_at, unit="s"),
        "exported": Figure(value=exported_at - started, unit="s"),
    }


def _spec(home: Path) -> JobSpec:
    source = {"table": "src.documents", "columns": ["x"], "identity_columns": ["doc_id"], "row_keys": True}
    order = {"batch_size": _BATCH, "key_groups": 8}
    raw = {"run": "passport", "source": source, "order": order, "launch": {"script": "-", "world_size": 1}}
    return parse_spec({**raw, "checkpoint": {"every_steps": 50}}, origin="the benchmark").resolved(home)


def _train(home: Path, spec: JobSpec) -> None:
    """Train in this process."""
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    os.environ["DLAC_HOME"] = str(home)
    with dlac.training_run(path) as run:
        model = torch.nn.Linear(1, 1)
        run.restore(dlac.TorchState(model=model))
        for batch in run.batches():
            run.step_done(batch.mean(batch["x"]))


def _keys_of(salt: str, identity: str, prefix: str, documents: int) -> npt.NDArray[np.int64]:
    """Return the keys of as many documents whose names have a prefix, int64 [documents]."""
    with duckdb.connect() as connection:
        connection.execute(sql_script("row_key"))
        query = f"SELECT row_key(?, ?, ['{prefix}' || range]) AS key FROM range({documents})"
        keys: npt.NDArray[np.int64] = connection.execute(query, [salt, identity]).fetchnumpy()["key"]
        return keys


if __name__ == "__main__":
    main()
