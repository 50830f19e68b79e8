"""Going back in a run whose tables have changed since: new or renamed columns, and rows that cannot be distinguished."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.types import StringType

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, Steps, source_rows
from tests.integration.test_legs import append, rewrite


def following(arena: Arena) -> JobSpec:
    """A run that follows its table, with a checkpoint every second step."""
    return arena.spec("r", world_size=1, follow="appends", passes=1, every_steps=2)


def rows_of_steps(steps: Steps) -> set[int]:
    """The row ids of all steps."""
    return {row for rows in steps.values() for row in rows}


@pytest.mark.soak
def test_exclusion_uses_newer_column(arena: Arena) -> None:
    """In what was planned before the column came it is null, and so nothing is excluded there."""
    table = arena.table(appends=(128,))
    spec = following(arena)
    arena.train(spec, until=4)  # rows of the first plan stay open
    with table.update_schema() as update:
        update.add_column("lang", StringType())
    arena.lakehouse.load("src.t").append(source_rows(128, 64).append_column("lang", pa.array(["en", "xx"] * 32)))
    arena.train(spec, until=4)
    arena.train(spec, until=5)
    rewind_run(arena.lakehouse, "r", nonce="op", step=2, exclude=["lang = 'xx'"])
    seen = rows_of_steps(arena.train(spec))
    assert len([row for row in seen if row < 128]) == 64
    assert {row for row in seen if row >= 128} <= set(range(128, 192, 2))
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems) == (True, ())


def test_exclusion_follows_renamed_column(arena: Arena) -> None:
    """Rows that come under the new name are excluded as well, and a rewind can name either."""
    table = arena.table(appends=(128,))
    spec = following(arena)
    arena.train(spec, until=4)
    rewind_run(arena.lakehouse, "r", nonce="op1", step=2, exclude=["even = true"])
    with table.update_schema() as update:
        update.rename_column("even", "is_even")
    new = source_rows(128, 128)
    arena.lakehouse.load("src.t").append(new.rename_columns([*new.column_names[:2], "is_even", *new.column_names[3:]]))
    seen = rows_of_steps(arena.train(spec))
    assert {row % 2 for row in seen} == {1}
    assert len([row for row in seen if row >= 128]) >= 32
    rewind_run(arena.lakehouse, "r", nonce="op2", step=2, exclude=["even = true", "is_even = false and row_id < 200"])
    seen = rows_of_steps(arena.train(spec))
    assert all(row % 2 and row >= 200 for row in seen)
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems) == (True, ())


def test_rewind_past_unknown_rows_is_refused(arena: Arena) -> None:
    """Where every launch would fail because the history of appends is lost, nothing is written."""
    arena.table(appends=(128,))
    spec = following(arena)
    arena.train(spec)
    append(arena, 128, 64)
    rewrite(arena, but_first=10)
    before = arena.rows("r")
    with pytest.raises(AppendHistoryLost):
        rewind_run(arena.lakehouse, "r", nonce="op", step=2, spec=spec)
    assert arena.rows("r") == before
    with pytest.raises(AppendHistoryLost):
        arena.train(spec)
    lenient = spec.model_copy(update={"source": spec.source.model_copy(update={"on_overwrite": "read"})})
    assert rewind_run(arena.lakehouse, "r", nonce="op", step=2, spec=lenient).step == 2
    arena.train(lenient)


@pytest.mark.soak
def test_small_appends_commit_nothing_after_exclusion(arena: Arena) -> None:
    """The branch's first checkpoint reports the rows left out. A trickle of rows must not push older checkpoints out."""
    arena.table(appends=(128,))
    spec = following(arena)
    arena.train(spec)
    rewind_run(arena.lakehouse, "r", nonce="op", step=2, exclude=["row_id >= 9999"])
    arena.train(spec)
    known = [row.checkpoint_id for row in arena.lineage("r")]
    for start in (128, 136):
        append(arena, start, 8)
        assert arena.train(spec) == {}
    assert [row.checkpoint_id for row in arena.lineage("r")] == known
    assert audit_run(arena.lakehouse, "r").exact
