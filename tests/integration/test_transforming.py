from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.errors import ResumeMismatch, UnsupportedColumn
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow
from tests.conftest import Arena

SMALL: dict[str, Any] = {"world_size": 1, "batch_size": 16, "key_groups": 4, "every_steps": 3, "passes": 2}
TRANSFORM = '''
import pyarrow as pa
import pyarrow.compute as pc

def some(batch):
    """Drops every third row, gives every fifth one twice, and cannot take the rows 13 and 77."""
    ids = batch["row_id"].to_numpy()
    if set(ids.tolist()) & {13, 77}:
        raise ValueError("unlucky")
    wanted = [i for i, row in enumerate(ids.tolist()) for _ in range(0 if row % 3 == 0 else 2 if row % 5 == 0 else 1)]
    return batch.take(pa.array(wanted, pa.int64()))

def all_rows(batch):
    """One row for each."""
    return batch.drop_columns(["dlac_row"])

def halves(batch):
    """A fraction in the place of a whole number."""
    return pa.record_batch({"row_id": pc.divide(pc.cast(batch["row_id"], pa.float64()), 2.0)})

def renamed(batch):
    """The column under another name."""
    return pa.record_batch({"number": batch["row_id"]})
'''


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A file with transforms."""
    path = tmp_path / "transforms.py"
    path.write_text(TRANSFORM)
    return str(path)


def expected() -> Counter[int]:
    """How often `some` gives each of 150 rows in two passes."""
    rows = (row for row in range(150) if row % 3 and row not in (13, 77))
    return Counter({row: 2 * (2 if row % 5 == 0 else 1) for row in rows})


def test_rows_are_dropped_multiplied_and_quarantined(arena: Arena, script: str) -> None:
    """What the transform gives is trained on, and the ledger names what it dropped and what it rejected, across a crash."""
    arena.table(appends=(100, 50), row_group_rows=20)
    spec = arena.spec("r", **SMALL, transform=f"{script}:some", on_reject="quarantine")
    first = arena.train(spec, until=8)
    rest = arena.train(spec)
    assert min(rest) == 7
    seen = Counter(row for step, rows in {**first, **rest}.items() for row in rows if step < 7 or step in rest)
    assert seen == expected()
    advances = arena.rows("r", AdvanceRow)
    assert sum(row.rows_consumed for row in advances) == 2 * 98
    assert sum(len(row.filtered) for row in advances) == 2 * 50
    assert [reason for row in advances for reason in row.quarantine_reasons] == ["ValueError: unlucky"] * 4
    report = audit_run(arena.lakehouse, "r")
    assert report.exact, report.problems
    assert (report.rows_consumed, report.rows_quarantined) == (196, 4)


def test_a_changed_transform_is_refused(arena: Arena, script: str) -> None:
    """A leg binds the transform's code: resuming with other code is not resuming."""
    arena.table(appends=(100, 50), row_group_rows=20)
    spec = arena.trained("r", **SMALL, transform=f"{script}:all_rows", until=8)
    Path(script).write_text(TRANSFORM + "\n# another comment\n")
    with pytest.raises(ResumeMismatch, match="transform: committed"):
        arena.train(spec)
    Path(script).write_text(TRANSFORM)
    assert min(arena.train(spec)) == 7


@pytest.mark.slow
def test_rows_end_before_the_last_step(arena: Arena, script: str) -> None:
    """A run with a transform whose rows end before `order.steps` is finished with them."""
    arena.table(appends=(100, 50), row_group_rows=20)
    steps = arena.train(arena.spec("r", **{**SMALL, "passes": 1}, steps=50, transform=f"{script}:all_rows"))
    assert sorted(row for rows in steps.values() for row in rows) == list(range(150))
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.finished, report.step) == (True, True, 10)


@pytest.mark.parametrize("second", ["halves", "renamed"])
def test_columns_of_sources_must_be_alike(arena: Arena, script: str, second: str) -> None:
    """A transform whose columns or types differ from another source of the mixture is refused, not converted."""
    arena.table(appends=(64,), row_group_rows=20)
    spec = arena.spec("r", **SMALL, columns=["row_id"], transform=f"{script}:all_rows")
    other = spec.source.model_copy(update={"name": "second", "transform": f"{script}:{second}"})
    with pytest.raises(UnsupportedColumn, match="expected columns of the same types and lengths from"):
        arena.train(spec.model_copy(update={"mixture": [other]}))
