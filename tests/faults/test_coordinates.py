"""Several processes of one data coordinate: they read the same share, and the ledger has its rows once."""

import os
import signal

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.replay.committed_steps import ranks_of_attempt
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import Arena


@pytest.fixture(scope="module")
def documents(campaign: Arena) -> Arena:
    """The campaign's lakehouse with a table of documents. Every token of a row is the row's number."""
    tokens = [[row] * int(length) for row, length in enumerate(np.random.default_rng(4).integers(1, 60, 300))]
    rows = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))})
    campaign.lakehouse.catalog.create_table(
        "src.pages", rows.schema, properties={"write.parquet.row-group-limit": "25"}
    )
    campaign.lakehouse.load("src.pages").append(rows)
    return campaign


def spec(arena: Arena, run: str, *, world_size: int, per_reader: int, **params: str) -> JobSpec:
    """Return a spec of packed documents, of which `per_reader` consecutive ranks read one share."""
    raw = {
        "run": run,
        "source": {"table": "src.pages", "columns": ["tokens"]},
        "sequences": {"length": 32},
        "order": {"batch_size": 8, "key_groups": 4, "seed": 5},
        "checkpoint": {"every_steps": 6, "memory_every_steps": 1},
        "launch": {
            "script": str(arena.program("train_packed.py")),
            "world_size": world_size,
            "mesh": {"tp": per_reader},
        },
        "params": {"journal": str(arena.home / "journal"), **params},
    }
    return parse_spec(raw, origin="the test").resolved(arena.home)


def test_ranks_of_a_coordinate_count_once(documents: Arena) -> None:
    """Two readers of two ranks each lose a rank, and four readers train on: rows and losses equal two ranks' alone."""
    run, whole = "shared", "alone"
    documents.launched(spec(documents, whole, world_size=2, per_reader=1))
    launch = documents.launch(spec(documents, run, world_size=4, per_reader=2, pause_s="0.05"))
    launch.wait_for("checkpoint", 2)
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    # one more may be committed before the supervisor sees the death
    launch.wait_for("checkpoint", 4)
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    documents.launched(spec(documents, run, world_size=4, per_reader=1))
    assert documents.journal(run) == documents.journal(whole)
    assert documents.losses(run) == pytest.approx(documents.losses(whole), rel=1e-5)
    assert audit_run(documents.lakehouse, run).exact
    assert {row.readers for row in documents.lineage(run)} == {2, 4}
    assert _consumed(documents, run) == _consumed(documents, whole)
    assert 2 in [claim.memory_readers for claim in documents.rows(run, ClaimRow) if claim.memory_of]
    steps = StepRows(documents.lakehouse, run)
    assert {row.rank for row in steps.of(1)} == {0, 2}
    assert [row.to_json() | {"rank": 0} for row in steps.of(1, rank=1)] == [
        row.to_json() for row in steps.of(1, rank=0)
    ]


def test_lost_steps_have_readers(arena: Arena) -> None:
    """The job spec of an attempt shows how many ranks read one share of a step that no checkpoint has."""
    folder = arena.home / "lost"
    folder.mkdir()
    (folder / "spec.json").write_text(spec(arena, "lost", world_size=4, per_reader=2).model_dump_json())
    claims = [ClaimRow(attempt=1, launch_folder=str(folder))]
    assert ranks_of_attempt(arena.lakehouse, claims, "lost", 1) == (4, 2, 1)


def _consumed(arena: Arena, run: str) -> int:
    """Return the rows of all advances on the surviving lineage."""
    lineage = {row.checkpoint_id for row in arena.lineage(run)}
    return sum(row.rows_consumed for row in arena.rows(run, AdvanceRow) if row.checkpoint_id in lineage)
