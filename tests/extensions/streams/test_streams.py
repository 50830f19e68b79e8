"""Runs that wait for appended rows in place."""

import os
import random
import signal
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.look.live_status import LiveStatus
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import Arena, source_rows, wait_until


def stream(arena: Arena, run: str, **changes: Any) -> JobSpec:
    """Return the spec of a run that streams a table."""
    arena.table(f"src.{run}", appends=(320, 100))
    return arena.spec(run, table=f"src.{run}", follow="stream", **changes)


def append(arena: Arena, run: str, start: int, count: int) -> None:
    """Append rows to the table of a run."""
    arena.lakehouse.load(f"src.{run}").append(source_rows(start, count))


def trained(arena: Arena, run: str) -> int:
    """Return the last committed step of a run, 0 without one."""
    return max((row.step for row in arena.rows(run, CheckpointRow)), default=0)


def assert_exact(arena: Arena, run: str, rows: int) -> None:
    """Check that the run has trained each row once, but those that fill no batch."""
    found = [row for step in arena.journal(run).values() for row in step]
    assert len(found) == len(set(found)) == rows // 32 * 32
    assert audit_run(arena.lakehouse, run).exact


def test_run_waits_for_rows_in_place(campaign: Arena) -> None:
    """Rows that are appended while ranks train or wait are trained by the same processes, and none that fill no batch."""
    arena = campaign
    launch = arena.launch(stream(arena, "streamed"))
    wait_until(lambda: trained(arena, "streamed") == 420 // 32, what="the first leg")
    ranks = launch.ranks()
    total = 420
    for count in (300, 20, 500, 64):
        append(arena, "streamed", total, count)
        total += count
        wait_until(lambda: trained(arena, "streamed") == total // 32, what=f"{total} rows")  # noqa: B023 - used at once
    assert [each.pid for each in launch.ranks()] == [each.pid for each in ranks]
    facts = LiveStatus(arena.lakehouse, "streamed").look()
    assert (facts["state"], facts["lag_rows"]) == ("idle", total % 32)
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert len(arena.rows("streamed", ClaimRow)) == 1
    assert_exact(arena, "streamed", total)


@pytest.mark.slow
def test_kills_lose_no_rows_of_a_stream(campaign: Arena) -> None:
    """Ranks and supervisors die while rows are appended: in legs, between them, and while nothing arrives."""
    arena, chance, run, total = campaign, random.Random(4), "killed", 420
    job = stream(arena, run, memory="/dev/shm", memory_every_steps=3, every_steps=7)
    launch = arena.launch(job)
    launch.wait_for("checkpoint")
    for number in range(12):
        count = chance.choice((40, 200, 450))
        append(arena, run, total, count)
        total += count
        time.sleep(chance.uniform(0.0, 1.5))
        if number % 4 == 3:
            launch.destroy()
            launch = arena.launch(job)
        elif ranks := launch.ranks():
            os.kill(chance.choice(ranks).pid, signal.SIGKILL)
        if number % 2:
            wait_until(lambda: trained(arena, run) == total // 32, what=f"{total} rows", within_s=60)  # noqa: B023
    wait_until(lambda: trained(arena, run) == total // 32, what=f"{total} rows", within_s=60)
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert_exact(arena, run, total)


def documents(start: int, count: int) -> pa.Table:
    """Return documents whose tokens are the number of their row."""
    return pa.table(
        {"tokens": pa.array([[row] * (row % 37 + 3) for row in range(start, start + count)], pa.list_(pa.int32()))}
    )


@pytest.mark.slow
def test_kills_lose_no_tokens_of_a_mixed_stream(campaign: Arena) -> None:
    """Documents of two tables are packed across legs, while ranks die: only the ends of few documents wait for more."""
    arena, chance, run = campaign, random.Random(5), "packed"
    tables = {"src.docs": 0, "src.code": 10_000}
    for name, first in tables.items():
        arena.lakehouse.catalog.create_table(name, documents(0, 1).schema).append(documents(first, 200))
        tables[name] = first + 200
    source, other = ({"table": name, "columns": ["tokens"], "follow": "stream"} for name in tables)
    raw = {
        "run": run,
        "source": {**source, "weight": 2.0},
        "mixture": [other],
        "sequences": {"length": 16},
        "order": {"batch_size": 16, "key_groups": 4, "seed": 5},
        "checkpoint": {"every_steps": 6, "memory_every_steps": 2},
        "launch": {"script": str(arena.program("train_packed.py")), "world_size": 2},
        "params": {"journal": str(arena.home / "journal"), "pause_s": "0.02"},
    }
    job = parse_spec(raw, origin="the test").resolved(arena.home)
    launch = arena.launch(job)
    launch.wait_for("checkpoint")
    for number in range(8):
        name = chance.choice([*tables])
        arena.lakehouse.load(name).append(documents(tables[name], 150))
        tables[name] += 150
        time.sleep(chance.uniform(0.5, 3.0))
        if number % 2:
            os.kill(chance.choice(launch.ranks()).pid, signal.SIGKILL)
            launch.wait_for("recovered", len(launch.of("recovered")) + 1)
    time.sleep(3)
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert audit_run(arena.lakehouse, run).exact
    sequences: Any = [sequence for step in arena.journal(run).values() for sequence in step]
    tokens = Counter(token for sequence in sequences for token in sequence)
    assert len(tokens) > 800
    assert all(count <= row % 37 + 3 for row, count in tokens.items())


@pytest.mark.slow
def test_deadly_row_of_a_later_leg_is_left_out(campaign: Arena) -> None:
    """The supervisor finds the rows in hand in the leg that the ranks have entered."""
    arena, run = campaign, "deadly"
    launch = arena.launch(stream(arena, run, deadly_row=500, deaths_at_same_rows=2, every_steps=5))
    wait_until(lambda: trained(arena, run) == 420 // 32, what="the first leg")
    append(arena, run, 420, 320)
    wait_until(lambda: trained(arena, run) >= 22, what="the rest", within_s=100)
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    found = [row for step in arena.journal(run).values() for row in step]
    assert len(found) == len(set(found))
    assert 500 not in found
    assert audit_run(arena.lakehouse, run).exact
