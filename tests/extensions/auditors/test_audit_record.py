"""An audit by a record equals an audit of everything, at any time of the record and after any forgery."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.auditors.record import audit_since
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import Columns
from tests.integration.audit_runs import (
    KINDS,
    Change,
    Workshop,
    changed,
    is_advance,
    rows_named,
    trained,
    unchanged,
    without,
)

COMMON = ("packed", pytest.param("followed", marks=pytest.mark.slow))
"""Kinds of runs that are audited part by part outside of the soak: with several legs, packing, skipped steps, late exclusions."""
_OTHERS = [pytest.param(kind, marks=pytest.mark.soak) for kind in sorted(KINDS.keys() - {"followed", "packed"})]


def _parts(workshop: Workshop, of: str, change: Change = unchanged) -> tuple[str, list[list[Columns]]]:
    """Return the name of a forged run, and its rows in parts that end with a checkpoint each: the first is in the ledger."""
    name = f"forged{next(workshop.names)}"
    rows, _ = workshop.forged(name, of, change, None)
    ends = [row["seq"] for row in rows_named(rows, "checkpoint")]
    bounds = [0, *ends[2 :: max(1, len(ends) // 4)], rows[-1]["seq"]]
    parts = [[row for row in rows if low < row["seq"] <= high] for low, high in pairwise(bounds)]
    workshop.append_rows("consumption", parts[0])
    return name, [part for part in parts[1:] if part]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*COMMON, *_OTHERS])
def test_record_answers_as_the_whole_ledger(workshop: Workshop, kind: str, tmp_path: Path) -> None:
    """After each part of a run of any kind, also of several legs, the audits are equal, and the record was used."""
    run, parts = _parts(workshop, trained(workshop, kind))
    heads = []
    for part in [[], *parts, []]:
        if part:
            workshop.append_rows("consumption", part)
        found = audit_since(workshop.lakehouse, run, record=tmp_path / "record")
        assert found.exact
        assert replace(found, recorded_checkpoint=None) == audit_run(workshop.lakehouse, run)
        heads.append((found.recorded_checkpoint, found.head_checkpoint))
    assert [recorded for recorded, _ in heads] == [None, *(head for _, head in heads[:-1])]


def _last(number: int) -> Callable[[Columns], bool]:
    """Pick advances of the last checkpoints: those from a seq on."""
    return lambda row: is_advance(row) and row["seq"] >= number


FORGED: dict[str, Callable[[Callable[[Columns], bool]], Change]] = {
    "dropped": without,
    "longer": lambda which: changed(which, rows_consumed=99),
    "elsewhere": lambda which: changed(which, 3, block=0, position_start=0, position_end=1),
    "later": lambda which: changed(which, 2, first_step=10**6),
    "not_applied": lambda which: changed(which, 1, applied=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("forged", FORGED)
def test_forgery_after_record_is_found(workshop: Workshop, forged: str, tmp_path: Path) -> None:
    """After any forgery since the record the audit equals one of the whole ledger, and nothing is recorded."""
    of = trained(workshop, "packed")
    seqs = [row["seq"] for row in rows_named(workshop.forged("", of, unchanged, None)[0], "checkpoint")]
    run, parts = _parts(workshop, of, FORGED[forged](_last(seqs[-3])))
    for part in parts[:-2]:
        workshop.append_rows("consumption", part)
    assert audit_since(workshop.lakehouse, run, record=tmp_path / "record").exact
    recorded = (tmp_path / "record").read_bytes()
    for part in parts[-2:]:
        workshop.append_rows("consumption", part)
    found = audit_since(workshop.lakehouse, run, record=tmp_path / "record")
    assert not found.exact
    assert found == audit_run(workshop.lakehouse, run)
    assert (tmp_path / "record").read_bytes() == recorded


def _again(rows: list[Columns]) -> Columns:
    return next(row for row in rows if is_advance(row))


def _rewind(rows: list[Columns]) -> Columns:
    return {**rows_named(rows, "checkpoint")[0], "kind": "rewind", "seq": rows[-1]["seq"] + 1, "rewind": {}}


@pytest.mark.parametrize(("row", "exact"), [(_again, False), pytest.param(_rewind, True, marks=pytest.mark.slow)])
def test_changed_past_is_audited_again(
    workshop: Workshop, row: Callable[[list[Columns]], Columns], exact: bool, tmp_path: Path
) -> None:
    """If recorded rows are others by now, or the head is one before them, everything is audited."""
    of = trained(workshop, "packed")
    name = f"forged{next(workshop.names)}"
    rows, _ = workshop.forged(name, of, unchanged, None)
    workshop.append_rows("consumption", rows)
    assert audit_since(workshop.lakehouse, name, record=tmp_path / "record").exact
    workshop.append_rows("consumption", [row(rows)])
    found = audit_since(workshop.lakehouse, name, record=tmp_path / "record")
    assert found.exact == exact
    assert found.recorded_checkpoint is None
    assert found == audit_run(workshop.lakehouse, name)


def test_record_must_be_of_the_run(workshop: Workshop, tmp_path: Path) -> None:
    """Another file, another run's record, and a missing folder are refused, and the file stays as it was."""
    run = trained(workshop, "packed")
    other, _ = _parts(workshop, run)
    audit_since(workshop.lakehouse, other, record=tmp_path / "other")
    (tmp_path / "text").write_text("notes")
    for name, found in (("other", f"found one of run '{other}'"), ("text", "ArrowInvalid"), ("no/x", "folder")):
        path = tmp_path / name
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(SpecInvalid, match=found):
            audit_since(workshop.lakehouse, run, record=path)
        assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.slow
def test_damaged_record_raises_no_other_error(workshop: Workshop, tmp_path: Path) -> None:
    """A record with a changed bit is refused, or does not change the report: its rows and facts are checked."""
    run, record = trained(workshop, "packed"), tmp_path / "record"
    expected = audit_since(workshop.lakehouse, run, record=record)
    whole, refused = record.read_bytes(), 0
    for place in range(8, len(whole), len(whole) // 6):
        record.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = audit_since(workshop.lakehouse, run, record=record)
        except SpecInvalid:
            refused += 1
        else:
            assert replace(found, recorded_checkpoint=None) == expected
    assert refused
