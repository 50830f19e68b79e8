"""A lakehouse on an S3 server: source tables, DLAC's own tables, and the ledger's commits."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import NameRow
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.object_store import Network, ObjectStore

ROWS, GROUP_ROWS = 1200, 100


def job(store: ObjectStore, home: Path) -> JobSpec:
    """A run over a table in the store."""
    home.mkdir(exist_ok=True)
    config = store.lakehouse(home)
    lakehouse = connect(config)
    lakehouse.create_namespace("src")
    ids = np.arange(ROWS)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 8).astype(np.int32)), 8)
    rows = pa.table({"row_id": pa.array(ids), "x": lists.cast(pa.list_(pa.int32()))})
    properties = {"write.parquet.row-group-limit": str(GROUP_ROWS)}
    lakehouse.catalog.create_table("src.t", rows.schema, properties=properties).append(rows)
    return parse_spec(
        {
            "run": "remote",
            "lakehouse": config.model_dump(),
            "source": {"table": "src.t", "columns": ["row_id", "x"]},
            "order": {"batch_size": 32, "key_groups": 4, "passes": 1, "seed": 1},
            "checkpoint": {"every_steps": 20},
            "launch": {"script": "unused.py"},
        },
        origin="the test",
    ).resolved(home)


def test_a_row_group_is_read_in_one_range(store: ObjectStore, tmp_path: Path) -> None:
    """Both columns of a row group come in one ranged request, not in two. Footers and repeats add a few requests."""
    spec = job(store, tmp_path / "home")
    lakehouse = connect(spec.lakehouse)
    leg = first_leg(spec, [make_plan(lakehouse, spec.source)])
    reader = open_leg(Plans(lakehouse), leg, spec).reader()
    before = store.requests("GET", "/src/t/data/")
    seen = [row for batch in reader for row in batch["row_id"][batch.valid].tolist()]
    reader.close()
    assert sorted(seen) == list(range(ROWS))
    assert store.requests("GET", "/src/t/data/") - before < 2 * ROWS // GROUP_ROWS


def test_a_run_is_killed_resumed_and_audited(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledger commits, recovery and audit work as on a disk, with the checkpoints in a local folder."""
    spec = job(store, tmp_path / "home")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    monkeypatch.setenv("DLAC_HOME", str(tmp_path / "home"))

    def train(until: int | None) -> list[int]:
        seen: list[int] = []
        with dlac.training_run(path) as run:
            run.restore(dlac.TorchState(model=torch.nn.Linear(1, 1)))
            for batch in run.batches():
                if batch.step == until:
                    break
                seen += batch["row_id"][batch.valid].tolist()
                run.step_done(0.0)
        return seen

    first = train(until=30)
    second = train(until=None)
    assert sorted(first[: 20 * 32] + second) == list(range(ROWS))
    report = audit_run(connect(spec.lakehouse), "remote")
    assert report.exact
    assert store.requests("PUT", "/dlac/consumption/") > 4
    done = {each.table: each for each in run_upkeep(connect(spec.lakehouse), keep=1)}
    assert done["consumption"].removed_files > 3
    assert store.requests("DELETE", "/dlac/consumption/") >= done["consumption"].removed_files
    assert audit_run(connect(spec.lakehouse), "remote").exact


def test_warehouse_outage_is_awaited(store: ObjectStore, network: Network, tmp_path: Path) -> None:
    """A look at the ledger reports the outage. An append is repeated until the store is back, and lands once."""
    lakehouse = connect(
        LakehouseConfig(warehouse="s3://lake/warehouse", properties=store.properties(network.url)).at_home(tmp_path)
    )
    ledger = Ledger(lakehouse)
    claim(ledger, "r", nonce="n", replaces=0)
    network.cut()
    with pytest.raises(CatalogUnreachable, match="warehouse"):
        ledger.rows("r")
    mends = threading.Timer(2.0, network.mend)
    mends.start()
    name_row = NameRow(name="kept")
    ledger.append("r", lambda state: Append(rows=[name_row], fence=replace(state.fence, seq=2)))
    mends.join()
    assert [row.kind for row in ledger.rows("r")] == ["claim", "name"]
