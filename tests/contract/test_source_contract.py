"""Promises of each source format, of which "folder" is another author's: exact and pinned versions, and refusals."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.dataset import DlacDataset, open_dataset
from dlac_pipeline.lakehouse.errors import NoSuchSnapshot, NoSuchTable, PinLost
from dlac_pipeline.lakehouse.source_names import SOURCES
from tests.conftest import PROGRAMS, Arena, source_rows
from tests.extensions.formats.delta_tables import planned_rows
from tests.installed import install_distribution

HUDI_TABLE = Path(__file__).parents[1] / "hudi_tables" / "cow_v9_txns_simple_nometa.zip"


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of a format, and its versions. `values` are a column's as another reader finds them in a version."""

    format: str
    location: Path
    column: str
    versions: Sequence[int]
    values: Callable[[int], list[Any]]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the source. The column may have any type."""
        return {"format": self.format, "columns": [self.column], "transform": f"{__file__}:lengthened"}

    def open(self, arena: Arena, **settings: Any) -> DlacDataset:
        """Open the table as a dataset with batches of one row."""
        place: dict[str, Any] = {"home": arena.home, "table": str(self.location)}
        return open_dataset(**place, batch_size=1, key_groups=1, **self.settings, **settings)

    def planned(self, arena: Arena, version: int | None = None, *, location: Path | None = None) -> list[Any]:
        """Return the values that a plan of a version finds, sorted."""
        rows = planned_rows(arena.lakehouse, location or self.location, version, **self.settings)
        return sorted(row[self.column] for row in rows)


def lengthened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a column as text of 64 bytes, so that any type becomes a tensor."""
    texts = [str(value).ljust(64).encode() for value in batch.column(0).to_pylist()]
    return pa.record_batch({batch.schema.names[0]: pa.array([list(text) for text in texts], pa.list_(pa.uint8(), 64))})


def make_delta(folder: Path) -> SourceTable:
    """Make a table of deltalake: two appends, then deleted rows."""
    from deltalake import DeltaTable, write_deltalake

    location = folder / "events"
    write_deltalake(location, source_rows(0, 40))
    write_deltalake(location, source_rows(40, 20), mode="append")
    DeltaTable(location).delete("row_id % 3 = 0")

    def values(version: int) -> list[int]:
        ids: list[int] = DeltaTable(location, version=version).to_pyarrow_table()["row_id"].to_pylist()
        return ids

    return SourceTable(format="delta", location=location, column="row_id", versions=(0, 1, 2), values=values)


def make_hudi(folder: Path) -> SourceTable:
    """Unpack a table that Spark wrote."""
    from hudi import HudiReadOptions, HudiTableBuilder

    shutil.unpack_archive(HUDI_TABLE, folder)
    [location] = [path for path in folder.iterdir() if (path / ".hoodie").exists()]
    table = HudiTableBuilder.from_base_uri(str(location)).build()
    instants = sorted(int(each.timestamp) for each in table.get_timeline().get_completed_commits())

    def values(version: int) -> list[str]:
        batches = table.read(HudiReadOptions().with_as_of_timestamp(str(version)))
        return [name for batch in batches for name in pa.record_batch(batch)["txn_id"].to_pylist()]

    return SourceTable(format="hudi", location=location, column="txn_id", versions=instants, values=values)


def make_folder(folder: Path) -> SourceTable:
    """Make a folder of Parquet files: two appends, then deleted rows."""
    location = folder / "files"
    location.mkdir()
    pq.write_table(source_rows(0, 40), location / "a.parquet")
    pq.write_table(source_rows(40, 24), location / "b.parquet")
    dead = [0, 7, 39]
    versions: list[dict[str, list[int]]] = [
        {"a.parquet": []},
        {"a.parquet": [], "b.parquet": []},
        {"a.parquet": dead, "b.parquet": []},
    ]
    (location / "versions.json").write_text(json.dumps(versions))
    rows = (range(40), range(64), [row for row in range(64) if row not in dead])
    return SourceTable(
        format="folder", location=location, column="row_id", versions=(0, 1, 2), values=lambda version: [*rows[version]]
    )


MAKERS = {"delta": make_delta, "folder": make_folder, "hudi": make_hudi}


@pytest.fixture(autouse=True)
def _folder_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the format of another author."""
    site = tmp_path / "site"
    site.mkdir()
    source = (PROGRAMS / "folder_format.py").read_text()
    points = {SOURCES.group: ["folder = folder_format:FOLDER"]}
    install_distribution(site, "folder-format", {"folder_format": source}, points)
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture(params=sorted(MAKERS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SourceTable:
    """Return a table of each format, with three versions or more."""
    table = MAKERS[request.param](tmp_path)
    assert len(table.versions) >= 3
    return table


def test_all_installed_formats_are_checked() -> None:
    """This contract has a table of each installed format."""
    assert [*SOURCES.points()] == sorted(MAKERS)


def test_every_version_reads_exactly(arena: Arena, source: SourceTable) -> None:
    """The newest version is planned first, then each older one, and the newest again. All have their own rows."""
    for version in (None, *source.versions, None):
        expected = sorted(source.values(source.versions[-1] if version is None else version))
        assert source.planned(arena, version) == expected, f"version {version}"


def test_planned_version_stays_pinned(arena: Arena, source: SourceTable) -> None:
    """A dataset reads the rows of an older version, once each, although the newest one was planned before it resumed."""
    version = source.versions[0]
    dataset = source.open(arena, version=version)
    batches = iter(dataset)
    read = [next(batches) for _ in range(2)]
    source.planned(arena)
    read += source.open(arena, version=version, state=dataset.state_dict())
    texts = [bytes(batch[source.column].flatten().tolist()).decode().strip() for batch in read]
    assert sorted(texts) == sorted(map(str, source.values(version)))


def test_vanished_file_is_refused(arena: Arena, source: SourceTable) -> None:
    """A planned file that is gone is missed before a resumed dataset reads a row."""
    version = source.versions[0]
    state = source.open(arena, version=version).state_dict()
    for file in source.location.rglob("*.parquet"):
        file.rename(file.with_suffix(".gone"))
    with pytest.raises(PinLost, match=r"gone, such as '.*\.parquet': .*VACUUM.*a new run.*hoodie\.cleaner"):
        source.open(arena, version=version, state=state)


def test_absent_version_and_table_are_refused(arena: Arena, source: SourceTable) -> None:
    """The number of no version, and a location without a table."""
    absent = source.versions[-1] + 1
    with pytest.raises(NoSuchSnapshot, match=f"expected .* {absent} .* found .*{source.versions[-1]}"):
        source.planned(arena, absent)
    with pytest.raises(NoSuchTable, match=r"expected .*/nothing'"):
        source.planned(arena, location=source.location.with_name("nothing"))


def test_run_follows_appended_versions(arena: Arena, tmp_path: Path) -> None:
    """A run of another author's format trains the files of a later version, leaves out rows that died, and is exact."""
    table = make_folder(tmp_path)
    versions = json.loads((table.location / "versions.json").read_text())
    (table.location / "versions.json").write_text(json.dumps(versions[:1]))
    place = {"format": "folder", "table": str(table.location)}
    spec = arena.spec("follows", **place, follow="appends", passes=1, batch_size=8, world_size=1, every_steps=1)
    assert len(arena.train(spec)) == 5
    (table.location / "versions.json").write_text(json.dumps(versions))
    arena.train(spec)
    assert sorted(row for step in arena.recorded("follows").values() for row in step) == [*range(64)]
    report = audit_run(arena.lakehouse, "follows")
    assert report.exact, report.problems
