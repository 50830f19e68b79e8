"""Contract of file formats: ours, and one of another distribution, give the same units, dead rows and batches."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.typedef import Record
from pyiceberg.types import FloatType, ListType, LongType, NestedField, StringType

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.formats.orc_files import Orc
from dlac_pipeline.extensions.formats.versions import ExternalFile
from dlac_pipeline.lakehouse.errors import DataFileUnreadable
from dlac_pipeline.lakehouse.files.open_file import FILES, open_file
from dlac_pipeline.lakehouse.iceberg.row_groups import row_groups_of
from tests.conftest import PROGRAMS, Arena, source_rows
from tests.installed import install_distribution

SCHEMA = Schema(
    NestedField(1, "row_id", LongType()),
    NestedField(2, "x", ListType(5, FloatType(), element_required=False)),
    NestedField(3, "name", StringType()),
)
ROWS = source_rows(0, 120).select(["row_id", "x", "name"])
_FILE, _UNIT = 60, 20


def _with_ids(field: pa.Field) -> pa.Field:
    """Return a field with its id as ORC writers of Iceberg put it there."""
    kind = field.type
    if pa.types.is_list(kind):
        kind = pa.list_(_with_ids(kind.value_field))
    return pa.field(field.name, kind, metadata={"iceberg.id": (field.metadata or {})[b"PARQUET:field_id"]})


def _write_orc(rows: pa.Table, sink: Any) -> None:
    schema = pa.schema([_with_ids(field) for field in rows.schema])
    # each write of a batch that exceeds the size of a stripe ends a stripe
    with orc.ORCWriter(sink, stripe_size=1, batch_size=_UNIT) as writer:
        for start in range(0, len(rows), _UNIT):
            writer.write(rows.slice(start, _UNIT).cast(schema))


def _write_arrow(rows: pa.Table, sink: Any) -> None:
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=_UNIT)


WRITERS: dict[str, Callable[[pa.Table, Any], None]] = {
    "parquet": lambda rows, sink: pq.write_table(rows, sink, row_group_size=_UNIT),
    "orc": _write_orc,
    "arrow": _write_arrow,
}


@pytest.fixture(params=sorted(WRITERS))
def suffix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The suffix of a format. The other author's is installed."""
    if request.param == "arrow":
        source = (PROGRAMS / "arrow_files.py").read_text()
        folder = tmp_path / "installed"
        folder.mkdir()
        points = {FILES.group: ["arrow = arrow_files:ARROW"]}
        monkeypatch.syspath_prepend(str(install_distribution(folder, "arrow-files", {"arrow_files": source}, points)))
    return str(request.param)


def content(suffix: str, rows: pa.Table) -> bytes:
    """Return a file of these rows."""
    sink = io.BytesIO()
    WRITERS[suffix](rows.cast(schema_to_pyarrow(SCHEMA)), sink)
    return sink.getvalue()


def make_table(arena: Arena, *paths: Path) -> Table:
    """Make the table src.t of these files."""
    table = arena.lakehouse.catalog.create_table("src.t", SCHEMA)
    with table.transaction() as change, change.update_snapshot().fast_append() as append:
        for path in paths:
            kind = FileFormat.PARQUET if path.suffix in (".parquet", ".arrow") else FileFormat.ORC
            size = path.stat().st_size
            file: dict[str, Any] = {"file_path": str(path), "file_format": kind, "file_size_in_bytes": size}
            file |= {"content": DataFileContent.DATA, "partition": Record(), "record_count": _FILE, "spec_id": 0}
            append.append_data_file(DataFile.from_args(**file))
    return arena.lakehouse.load("src.t")


def table_of(arena: Arena, suffix: str) -> Table:
    """Make the table src.t of two files in a format."""
    paths = [arena.home / f"data-{number}.{suffix}" for number in range(len(ROWS) // _FILE)]
    for number, path in enumerate(paths):
        path.write_bytes(content(suffix, ROWS.slice(number * _FILE, _FILE)))
    return make_table(arena, *paths)


def test_every_installed_format_is_tested() -> None:
    """The contract covers each format that this distribution has."""
    assert {*FILES.points(), "parquet"} <= WRITERS.keys()


def test_footer_and_units_agree(suffix: str) -> None:
    """The rows of all units, in order, are the rows of the file. What a footer states of a unit is true."""
    rows = ROWS.slice(0, _FILE)
    opened = open_file(f"s3://b/f.{suffix}", pa.BufferReader(content(suffix, rows)), SCHEMA.fields)
    footer = opened.footer
    assert list(footer.rows) == [_UNIT] * (_FILE // _UNIT)
    assert footer.schema.names == rows.column_names
    assert opened.read_all(["row_id", "name"]).to_pydict() == rows.select(["row_id", "name"]).to_pydict()
    for unit in range(len(footer.rows)):
        read = opened.read(unit, ["row_id"], remote=unit == 1, threads=unit == 2)
        assert read.column_names == ["row_id"]
        assert footer.bytes_of(unit) > 0
        bounds = footer.bounds(unit, "row_id", pa.int64())
        if bounds is not None:
            assert (bounds.lower.as_py(), bounds.upper.as_py()) == (
                read["row_id"][0].as_py(),
                read["row_id"][-1].as_py(),
            )
        assert footer.values(unit, "x") in (None, (4 * _UNIT, 0))


def test_unrecorded_rows_are_counted(tmp_path: Path, suffix: str) -> None:
    """Where an external table does not record a file's rows, the footer has them, in any format."""
    (path := tmp_path / f"data.{suffix}").write_bytes(content(suffix, ROWS))
    none_dead = np.empty(0, dtype=np.int64)
    file = ExternalFile(path=str(path), bytes=path.stat().st_size, rows=None, partition=(), dead=none_dead)
    assert file.count_rows(PyArrowFileIO()) == len(ROWS)


def test_damaged_file_is_named(suffix: str) -> None:
    """A file that was cut raises what the callers turn into an error that names the file."""
    whole = content(suffix, ROWS)
    for damaged in (whole[: len(whole) // 2], b"", b"nothing"):
        with pytest.raises((OSError, pa.ArrowException)):
            open_file(f"f.{suffix}", pa.BufferReader(damaged), SCHEMA.fields)


def test_training_is_exact_and_audited(arena: Arena, suffix: str) -> None:
    """Filter, plan, training after a crash, and audit: the same rows as from the table in Parquet. A lost file is named."""
    table = table_of(arena, suffix)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    groups = row_groups_of(table, snapshot.snapshot_id, "row_id >= 25 AND name <> 'row 40'")
    live = [each.first_row + np.setdiff1d(np.arange(each.rows), each.dead) for each in groups]
    starts = {str(arena.home / f"data-{number}.{suffix}"): number * _FILE for number in range(2)}
    ids = np.concatenate([starts[each.file_path] + at for each, at in zip(groups, live, strict=True)])
    assert ids.tolist() == [row for row in range(25, 120) if row != 40]
    spec = arena.spec("r", world_size=1, passes=1, batch_size=8, row_filter="row_id >= 25", every_steps=4)
    before = arena.train(spec, until=7)
    after = arena.train(spec)
    assert before.keys() & after.keys() == {5, 6}
    seen = before | after
    assert sorted(row for rows in seen.values() for row in rows) == list(range(25, 120))
    assert audit_run(arena.lakehouse, "r").exact
    (arena.home / f"data-1.{suffix}").unlink()
    assert f"data-1.{suffix}" in str(audit_run(arena.lakehouse, "r").to_json())
    with pytest.raises(DataFileUnreadable, match=rf"data-1\.{suffix}"):
        arena.train(arena.spec("again", world_size=1, passes=1, batch_size=8))


def test_audit_names_undecodable_file(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that cannot read a planned file any more makes a finding of the audit."""
    table_of(arena, "orc")
    arena.train(arena.spec("r", world_size=1, passes=1, batch_size=8))

    def fail(*_: object) -> None:
        raise pa.ArrowNotImplementedError("a new type")

    monkeypatch.setattr(Orc, "read_footer", fail)
    assert "a new type" in str(audit_run(arena.lakehouse, "r").to_json())


def test_unknown_suffix_is_refused(arena: Arena) -> None:
    """A manifest's ORC file whose name no installed format reads ends the plan with the way out."""
    (path := arena.home / "data.zzz").touch()
    make_table(arena, path)
    with pytest.raises(DataFileUnreadable, match=r"suffix of an installed format, found ORC at .*data\.zzz"):
        arena.train(arena.spec("r", world_size=1))
