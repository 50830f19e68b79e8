import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hudi import HudiReadOptions, HudiTableBuilder

from dlac_pipeline.extensions.formats.hudi import HudiSource
from dlac_pipeline.extensions.history.changes import changes
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, UnsupportedSnapshot
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.lakehouse.source_names import external_identifier
from tests.conftest import Arena
from tests.extensions.formats.delta_tables import Rows, planned_rows

TABLES = Path(__file__).parents[2] / "hudi_tables"
TRANSACTIONS = "cow_v9_txns_simple_nometa"
COPY_ON_WRITE = ["cow_v6_complexkeygen_hivestyle", "cow_v6_simplekeygen_nonhivestyle_overwritetable"]
MERGE_ON_READ = "mor_avro_v9_txns_nonpart_nometa"


def unpack(name: str, folder: Path) -> Path:
    """Unpack a table into a folder, and return its location."""
    shutil.unpack_archive(TABLES / f"{name}.zip", folder)
    [location] = [path for path in folder.iterdir() if (path / ".hoodie").exists()]
    return location


def instants(arena: Arena, location: Path) -> list[int]:
    """The numbers of all versions."""
    source = HudiSource(str(location), {}, arena.lakehouse.own("plans").io)
    return list(source.numbers(0, source.newest))


def read(location: Path, instant: int) -> Rows:
    """The rows of a version as the library reads them, which merges log files itself."""
    table = HudiTableBuilder.from_base_uri(str(location)).build()
    found: Rows = pa.Table.from_batches(table.read(HudiReadOptions().with_as_of_timestamp(str(instant)))).to_pylist()
    return found


def planned(arena: Arena, location: Path, instant: int | None) -> Rows:
    """The live rows of a plan of a version."""
    names = HudiTableBuilder.from_base_uri(str(location)).build().get_schema().names
    return planned_rows(arena.lakehouse, location, instant, format="hudi", columns=names, transform=f"{__file__}:same")


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A transform, so that columns need not be numbers."""
    return batch


def in_order(rows: Rows, names: list[str]) -> list[str]:
    """Rows in an order that does not depend on their files."""
    return sorted(repr([row[name] for name in names]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", COPY_ON_WRITE)
def test_every_instant_reads_exactly(arena: Arena, tmp_path: Path, name: str) -> None:
    """Inserts, upserts, deletes, overwrites of partitions and of the table, and clustering, of tables that Spark wrote."""
    location = unpack(name, tmp_path / "t")
    versions = instants(arena, location)
    assert len(versions) >= 2
    for version in (*versions, None):
        found, expected = planned(arena, location, version), read(location, version or versions[-1])
        names = list(found[0])
        assert in_order(found, names) == in_order(expected, names), f"instant {version}"


@pytest.mark.slow
def test_uncompacted_log_files_are_refused(arena: Arena, tmp_path: Path) -> None:
    """Their rows have no positions. After a compaction the same table reads exactly."""
    location = unpack(MERGE_ON_READ, tmp_path / "t")
    *versions, compaction, clustering, insert = instants(arena, location)
    for version in versions:
        with pytest.raises(UnsupportedSnapshot, match="log files: compact the table first"):
            planned(arena, location, version)
    for version in (compaction, clustering, insert):
        found, expected = planned(arena, location, version), read(location, version)
        assert in_order(found, list(found[0])) == in_order(expected, list(found[0])), f"instant {version}"


@pytest.mark.slow
def test_inserts_are_followed(arena: Arena, tmp_path: Path) -> None:
    """New file groups are appends, and clustering is a rewrite. An upsert is an overwrite unless rows have an identity."""
    location = unpack(TRANSACTIONS, tmp_path / "t")
    versions = instants(arena, location)
    identifier = external_identifier("hudi", str(location))
    for version in (versions[0], None):
        table = load_version(arena.lakehouse, identifier, version)
    operations = [snapshot.summary and snapshot.summary.operation.value for snapshot in table.snapshots()]
    assert operations == ["append", *["overwrite"] * 5, "append", "overwrite", "append", "append", "replace", "append"]
    assert [len(portion.files) for portion in changes(table, versions[7], versions[-1]).portions] == [2, 2]
    with pytest.raises(AppendHistoryLost, match="found an overwrite"):
        _ = changes(table, versions[0], versions[-1]).portions
    changes(table, versions[0], versions[-1], on_overwrite="read", identity_columns=["txn_id"]).check()
