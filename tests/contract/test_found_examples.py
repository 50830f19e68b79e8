"""Failures that examples of the contract found, as tests of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlac_pipeline.lakehouse.errors import EmptyPlan, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec
from tests.contract.contract import PER_ROW, Reading
from tests.contract.readings import LISTS, PACKED, packed_slot, tokens_of, transformed
from tests.contract.runs import GlobalBatch, Run
from tests.contract.tables import SourceTable
from tests.small_records import small_spec


def spec_of(reading: Reading, order: dict[str, Any], **source: Any) -> JobSpec:
    """Return a spec that reads src.t with these settings."""
    read = {"columns": list(reading.columns), **reading.source, **source}
    order = {"key_groups": 2, "batch_size": 4, "seed": 1, **order}
    return small_spec(source=read, order=order, sequences=dict(reading.sequences))


def table_of(lakehouse: Lakehouse, reading: Reading, *appends: int) -> SourceTable:
    """Return the table src.t with these appends."""
    table = SourceTable(lakehouse, "src.t", reading.rows)
    for rows in appends:
        table.append(rows)
    return table


def test_added_passes_skip_excluded_rows(lakehouse: Lakehouse) -> None:
    """Exclusions also hold for passes that a later leg adds."""
    table_of(lakehouse, LISTS, 20, 20)
    run = Run.begin(lakehouse, spec_of(LISTS, {"passes": 1}))
    run.attempt(steps=2)
    excluding = {"exclude": ["row_id < 10"]}
    assert run.turn(spec_of(LISTS, {"passes": 1}, **excluding), repin=False)
    run.attempt(steps=2)
    assert run.turn(spec_of(LISTS, {"passes": 2}, **excluding), repin=False)
    run.attempt(steps=None)
    later = [row for batch in run.batches[2:] for row in batch.tensors["row_id"][batch.valid].tolist()]
    assert min(later) == 10
    assert sum(row == 10 for row in later) >= 1


def test_row_removed_during_read_is_skipped(lakehouse: Lakehouse) -> None:
    """The rest of a deleted document that was packed in part is skipped. The next document begins at its beginning."""
    table = table_of(lakehouse, PACKED, 40)
    spec = spec_of(PACKED, {}, follow="appends", identity_columns=["row_id"])
    run = Run.begin(lakehouse, spec)
    while not any(cursor.offset for cursor in run.state[0]):
        assert run.attempt(steps=1)
    read = run.batches[-1].tensors["tokens"]
    split = {int(read[-1][-1]) // PER_ROW, int(read[1][-1]) // PER_ROW}
    table.delete_positions(split)
    assert run.turn(spec, repin=True)
    later = run.attempt(steps=None)
    assert later
    assert not split & {int(token) // PER_ROW for batch in later for token in batch.tensors["tokens"].reshape(-1)}


def test_removed_rows_near_end_are_skipped(lakehouse: Lakehouse) -> None:
    """Deletes that leave some key group less than a batch end the leg at once. The remaining rows follow with the next append."""
    table = table_of(lakehouse, LISTS, 40)
    spec = spec_of(LISTS, {}, follow="appends", identity_columns=["row_id"])
    run = Run.begin(lakehouse, spec)
    run.attempt(steps=2)
    left = sorted(table.live - ids_of(run.batches))
    table.delete_positions(left[:-1])
    assert run.turn(spec, repin=True)
    assert not run.attempt(steps=None, world_size=2)
    table.append(30)
    assert run.turn(spec, repin=True)
    later = ids_of(run.attempt(steps=None))
    assert later <= {left[-1], *range(40, 70)}
    assert len(later) == 28


def test_endless_sampleless_source_is_refused(lakehouse: Lakehouse) -> None:
    """An endless source whose documents are all empty is refused, and not read for ever."""
    table_of(lakehouse, PACKED, 1)  # row 0 has no token
    run = Run.begin(lakehouse, spec_of(PACKED, {"steps": 50}, passes=0))
    with pytest.raises(SpecInvalid, match=r"source 0, which is read again and again .* found none in \d+ passes"):
        run.attempt(steps=2)


@pytest.mark.parametrize(
    ("order", "passes", "found"),
    [({}, 1, r"exclusions \['row_id >= 0'\] leave none"), ({"steps": 50}, 0, "read again and again")],
)
def test_new_exclusions_leave_rows(lakehouse: Lakehouse, order: dict[str, Any], passes: int, found: str) -> None:
    """A new leg whose exclusions leave no row of a source is refused. It would end the run, or never find a row."""
    table_of(lakehouse, LISTS, 20)
    run = Run.begin(lakehouse, spec_of(LISTS, order, passes=passes))
    run.attempt(steps=1)
    with pytest.raises(EmptyPlan, match=found):
        run.turn(spec_of(LISTS, order, passes=passes, exclude=["row_id >= 0"]), repin=False)


def ids_of(batches: Sequence[GlobalBatch]) -> set[int]:
    """Return the row ids in these batches."""
    return {row for batch in batches for row in batch.tensors["row_id"][batch.valid].tolist()}


def test_rank_without_samples_has_all_columns(lakehouse: Lakehouse, tmp_path: Path) -> None:
    """The transform returns nothing for the first rows: key group 0 has only row 0."""
    reading = transformed(tmp_path)
    table_of(lakehouse, reading, 1, 1)
    run = Run.begin(lakehouse, spec_of(reading, {"batch_size": 2, "shuffle": False}))
    together, apart = run.attempt(steps=None, commit=0), run.attempt(world_size=2, steps=None, commit=0)
    assert [batch.valid.tolist() for batch in together] == [[False, True]]
    assert [batch.digest for batch in together] == [batch.digest for batch in apart]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_empty_source_leaves_slots_to_others(lakehouse: Lakehouse, batch_size: int) -> None:
    """A source may end with rows without tokens, which only a reader knows. The batch is filled, and the run continues."""
    table_of(lakehouse, PACKED, 1)  # row 0 has no tokens
    SourceTable(lakehouse, "src.u", PACKED.rows).append(40)
    spec = spec_of(PACKED, {"passes": 1, "batch_size": batch_size, "key_groups": 1})
    other = spec.source.model_copy(update={"table": "src.u", "weight": 0.4})
    run = Run.begin(lakehouse, spec.model_copy(update={"mixture": [other]}))
    found: list[int] = []
    for batch in run.attempt(steps=None):
        for slot in np.flatnonzero(batch.valid).tolist():
            found += packed_slot(batch.tensors, slot)
    assert sorted(found) == sorted(token for row in range(40) for token in tokens_of(row))
