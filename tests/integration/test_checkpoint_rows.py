import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.manifest import read_manifest
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, FinishRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena


def check_recorded(arena: Arena, seen: dict[int, list[int]]) -> None:
    """Each surviving checkpoint's advances name exactly the rows that were in the tensors since its parent."""
    recorded, first = arena.recorded("r1"), 1
    for row in arena.lineage("r1"):
        assert recorded[row.step] == sorted(i for step in range(first, row.step + 1) for i in seen[step])
        first = row.step + 1


def test_advances_name_exactly_the_rows_that_were_read(arena: Arena, spec: JobSpec) -> None:
    """SQL over ledger, slices and data files gives the rows that training saw. What a dead attempt lost is recorded once."""
    seen = arena.train(spec, until=8)
    seen |= arena.train(spec, until=14)
    seen |= arena.train(spec)
    assert [(row.attempt, row.step, len(row.losses)) for row in arena.lineage("r1")] == [
        (1, 5, 5),
        (2, 10, 5),
        (3, 15, 5),
    ]
    check_recorded(arena, seen)


def test_skipped_steps_are_not_applied(arena: Arena, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a skipped step are in the ledger, in advances of their own, and the checkpoint counts the step."""
    steps = iter(range(1, 17))
    monkeypatch.setattr(TorchState, "step_applied", lambda self: next(steps) not in (2, 3, 7))
    check_recorded(arena, arena.train(spec))
    assert [(row.applied_steps, row.skipped_steps) for row in arena.lineage("r1")] == [(3, 2), (4, 1), (5, 0)]
    skipped = [row for row in arena.rows("r1", AdvanceRow) if not row.applied]
    assert {(row.first_step, row.last_step) for row in skipped} == {(2, 2), (3, 3), (7, 7)}
    assert sum(row.rows_consumed for row in skipped) == 3 * 16


def test_a_manifest_repeats_the_rows_since_its_parent(arena: Arena, spec: JobSpec) -> None:
    """A manifest holds its checkpoint's ledger rows and those between, so that a lost ledger could be rebuilt from it."""
    arena.train(spec, until=8)
    arena.train(spec)

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("kind", "key_group", "pass", "block", "position_start", "position_end"))

    ledger = [row for row in arena.rows("r1") if not isinstance(row, FinishRow)]
    manifests = [read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles()) for row in arena.lineage("r1")]
    repeated = [row for manifest in manifests for row in manifest.ledger_rows]
    assert sorted(map(repr, map(key, repeated))) == sorted(repr(key(row.to_columns())) for row in ledger)
    assert {manifest.ledger_uuid for manifest in manifests} == {Ledger(arena.lakehouse).table_uuid}
    assert [manifest.parent for manifest in manifests] == [None, *(m.checkpoint_id for m in manifests[:-1])]
    json.dumps(manifests[-1].ledger_rows)


def test_racing_handles_lose_nothing(arena: Arena) -> None:
    """Four handles that append for runs of their own at once all get through, each claim recorded once."""

    def claims(worker: int) -> None:
        ledger = Ledger(connect(arena.lakehouse.config), deadline_s=240.0)
        for turn in range(5):
            claim(ledger, f"run-{worker}", nonce=f"{worker}-{turn}", replaces=turn)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(claims, range(4)))
    for worker in range(4):
        assert [(row.seq, row.attempt) for row in arena.rows(f"run-{worker}")] == [(n, n) for n in range(1, 6)]
