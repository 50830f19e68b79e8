from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

if TYPE_CHECKING:
    from tests.conftest import Arena

DOCUMENTS = {"src.web": (0, 400), "src.code": (1000, 150)}


def documents(first: int, count: int) -> pa.Table:
    """Return documents of 0 to 60 tokens. Every token of a row is the row's number."""
    lengths = np.random.default_rng(first).integers(0, 60, count)
    rows = np.arange(first, first + count)
    tokens = pa.array(
        [[int(row)] * int(length) for row, length in zip(rows, lengths, strict=True)], pa.list_(pa.int32())
    )
    return pa.table({"row_id": pa.array(rows), "good": pa.array(rows % 7 != 0), "tokens": tokens})


@pytest.fixture(scope="module")
def packed(campaign: Arena) -> Arena:
    """The campaign's lakehouse with two tables of documents, and an undisturbed run over both."""
    for name, (first, count) in DOCUMENTS.items():
        rows = documents(first, count)
        campaign.lakehouse.catalog.create_table(name, rows.schema, properties={"write.parquet.row-group-limit": "25"})
        for start in range(0, count, 100):
            campaign.lakehouse.load(name).append(rows.slice(start, 100))
    launch = campaign.launch(spec(campaign, "packed-whole"))
    assert launch.wait() == 0, launch.stderr
    return campaign


def spec(arena: Arena, run: str, *, world_size: int = 2, **params: Any) -> JobSpec:
    """Return a spec of two sources, filtered, shuffled and packed to 32 tokens. The first is read twice, the second once."""
    sources = [
        {"table": name, "columns": ["tokens"], "row_filter": "good = true", "weight": weight, "passes": passes}
        for name, weight, passes in (("src.web", 0.7, 1), ("src.code", 0.3, 2))
    ]
    raw = {
        "run": run,
        "source": sources[0],
        "mixture": sources[1:],
        "sequences": {"length": 32},
        "order": {"batch_size": 8, "key_groups": 4, "seed": 5},
        "checkpoint": {"every_steps": 7},
        "launch": {"script": str(arena.program("train_packed.py")), "world_size": world_size},
        "params": {"journal": str(arena.home / "journal"), **{name: str(value) for name, value in params.items()}},
    }
    return parse_spec(raw, origin="the test").resolved(arena.home)


def tokens_of(arena: Arena, run: str) -> Counter[int]:
    """Return how often each token was trained on, on the surviving lineage."""
    return Counter(token for sequences in arena.journal(run).values() for each in sequences for token in each)  # type: ignore[attr-defined]  # here a "row" is a sequence


@pytest.mark.soak
def test_every_token_once_per_pass(packed: Arena) -> None:
    """Documents of both tables are read once per pass of their source, without the rows that the filter drops."""
    expected: Counter[int] = Counter()
    for name, passes in (("src.web", 1), ("src.code", 2)):
        for row in packed.lakehouse.load(name).scan().to_arrow().to_pylist():
            if row["good"] and row["tokens"]:
                expected[row["row_id"]] += passes * len(row["tokens"])
    assert tokens_of(packed, "packed-whole") == expected


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_kill_and_rescale_keep_packed_order(packed: Arena, seed: int) -> None:
    """2 ranks with one killed, in the campaign also 4, 1, and 8 that share key groups, train the same batches."""
    run = f"packed-{seed}"
    launch = packed.launch(spec(packed, run, pause_s=0.02))
    launch.wait_for("checkpoint", 1 + seed)
    os.kill(launch.ranks()[seed % 2].pid, signal.SIGKILL)
    launch.wait_for("checkpoint", 3 + seed)
    for world_size in (4, 1) if seed else ():
        os.kill(launch.process.pid, signal.SIGTERM)
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
        launch = packed.launch(spec(packed, run, world_size=world_size, pause_s=0.02))
        launch.wait_for("checkpoint", 1)
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    last = packed.launch(spec(packed, run, world_size=8))
    assert last.wait() == 0, last.stderr
    assert last.of("ended")[0]["ending"] == "finished"
    assert packed.journal(run) == packed.journal("packed-whole")
    assert packed.losses(run) == pytest.approx(packed.losses("packed-whole"), rel=1e-5)
    assert {row.world_size for row in packed.lineage(run)} == ({1, 2, 4, 8} if seed else {2, 8})
