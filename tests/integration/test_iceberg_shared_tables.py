from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable, Table

from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, name_mapping_of
from dlac_pipeline.lakehouse.iceberg.data_files import live_files, snapshot_schema
from dlac_pipeline.lakehouse.iceberg.row_groups import row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from tests.integration.iceberg_oracle import live_positions, oracle
from tests.integration.iceberg_writer import Written

TABLES = Path(__file__).parents[3] / "shared" / "tables"
pytestmark = pytest.mark.skipif(not TABLES.is_dir(), reason="the tables of other engines are not at hand")

DEFAULTS = """
    SELECT col1, true AS col_boolean, 342342::INT AS col_integer, -9223372036854775808 AS col_long, 0.34234::FLOAT AS col_float,
        0.342343242342342::DOUBLE AS col_double, 12345::DECIMAL(16, 2) AS col_decimal, DATE '2003-10-20' AS col_date,
        TIME '00:00:00.012345' AS col_time, TIMESTAMP '1970-01-01 00:00:00.012345' AS col_timestamp,
        TIMESTAMPTZ '1970-01-01 00:00:00.012345+00' AS col_timestamptz, 'HELLO' AS col_string,
        'f79c3e09-677c-4bbd-a479-3f349cb785e7'::UUID AS col_uuid, '\\x01\\x02\\x03\\xff\\x03'::BLOB AS col_fixed,
        '\\x01\\x02'::BLOB AS col_binary
    FROM read_parquet('data/persistent/add_columns_with_defaults/**/*0bb8c58e*.parquet')
    UNION ALL SELECT * FROM read_parquet('data/persistent/add_columns_with_defaults/**/*f1823874*.parquet')
"""
"""Rows of the two files of that table as DuckDB reads them, with the defaults in its metadata."""

PERSISTENT = "data/persistent"
CASES: dict[str, tuple[str, str, int, str | None]] = {
    "equality": (".", f"{PERSISTENT}/equality_deletes/warehouse/mydb/mytable/metadata/v7", 2, None),
    "partitioned": (".", f"{PERSISTENT}/equality_deletes/warehouse/mydb/mytable_partitioned/metadata/v6", 3, None),
    "mapping": (".", f"{PERSISTENT}/name_mapping/warehouse_1/mydb/t1/metadata/v7", 10_000, None),
    "nested": (".", f"{PERSISTENT}/column_mapping/warehouse/default.db/my_table/metadata/00001-*", 3, None),
    "defaults": (".", f"{PERSISTENT}/add_columns_with_defaults/default.db/*/metadata/00003-*", 3, DEFAULTS),
    "filter": (".", f"{PERSISTENT}/expression_filter/metadata/00001-*", 3, None),
    "nulls": (".", f"{PERSISTENT}/is_null_is_not_null/metadata/00001-*", 8, None),
    "lineitem": ("lineitem", "lineitem_iceberg/metadata/v2", 51_793, None),
    "lineitem_v1": ("lineitem", "lineitem_iceberg_gz/metadata/v2.gz", 111_968, None),
}


def opened(name: str, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table by the name of its case, from its working folder."""
    folder, metadata, _, _ = CASES[name]
    monkeypatch.chdir(TABLES / folder)
    (path,) = Path().glob(f"{metadata}.metadata.json")
    return StaticTable.from_metadata(str(path))


def written(table: Table) -> list[Written]:
    """The files of the current snapshot as pyiceberg's manifest reader lists them."""
    snapshot = snapshot_of(table, None)
    found = []
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io):
            file, spec = entry.data_file, table.specs()[entry.data_file.spec_id]
            where = None if spec.is_unpartitioned() else (file.spec_id, tuple(file.partition._data))
            named = [one for one in pq.read_schema(file.file_path) if b"PARQUET:field_id" in (one.metadata or {})]
            names = {int(one.metadata[b"PARQUET:field_id"]): one.name for one in named}
            columns, sequence = tuple(names[one] for one in file.equality_ids or ()), entry.sequence_number or 0
            place: dict[str, Any] = {"path": file.file_path, "sequence": sequence, "partition": where}
            found.append(Written(content=file.content, columns=columns, **place))
    return found


def live_rows(table: Table) -> pa.Table:
    """All live rows, as a reader gets them: planned, read, aligned."""
    snapshot = snapshot_of(table, None)
    schema = snapshot_schema(table, snapshot.snapshot_id)
    files = {one.path: one for one in live_files(table, snapshot.snapshot_id)}
    parts = []
    for path, positions in live_positions(row_groups_of(table, snapshot.snapshot_id, "")).items():
        parquet = pq.ParquetFile(path)
        names, values = [one.name for one in schema.fields], files[path].partition_values
        mapping = name_mapping_of(table)
        columns = FileColumns.of(parquet.schema_arrow, schema, names, name_mapping=mapping, partition_values=values)
        rows = columns.align(parquet.read(columns=columns.in_file), parquet.metadata.num_rows)
        parts.append(rows.take(pa.array(positions, pa.int64())))
    return pa.concat_tables(parts)


@pytest.mark.parametrize("name", CASES)
def test_live_rows_are_those_that_duckdb_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of the table's README, DuckDB's anti joins, and one hash over all rows agree."""
    table, (_, _, count, rows) = opened(name, monkeypatch), CASES[name]
    live = oracle(written(table))
    assert live_positions(row_groups_of(table, snapshot_of(table, None).snapshot_id, "")) == live
    assert sum(map(len, live.values())) == count
    ours = live_rows(table)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        theirs = rows or " UNION ALL BY NAME ".join(
            f"SELECT * FROM read_parquet('{path}', file_row_number = true) WHERE file_row_number IN ({str(places)[1:-1]})"
            if len(places) < 100
            else f"SELECT * FROM read_parquet('{path}')"  # whole files: the positions were compared before
            for path, places in live.items()
            if places
        )
        columns = ", ".join(f'"{one}"' for one in ours.column_names)
        connection.register("ours", _uuids(ours))
        hashed = f"SELECT count(*), bit_xor(hash(t::VARCHAR)) FROM (SELECT {columns} FROM ({{}})) AS t"
        hashes = [connection.execute(hashed.format(query)).fetchone() for query in ("FROM ours", theirs)]
    assert hashes[0] == hashes[1]
    assert hashes[0] is not None
    assert hashes[0][0] == count


def _uuids(table: pa.Table) -> pa.Table:
    """With 16-byte columns as uuids, as DuckDB prints them."""
    for place, column in enumerate(table.columns):
        if column.type == pa.binary(16):
            chunks: list[Any] = [pa.ExtensionArray.from_storage(pa.uuid(), chunk) for chunk in column.chunks]
            table = table.set_column(place, table.column_names[place], pa.chunked_array(chunks, type=pa.uuid()))
    return table


@pytest.mark.parametrize(
    ("name", "row_filter", "where"),
    [
        ("lineitem", "l_quantity < 10 AND l_shipmode = 'AIR'", "l_quantity < 10 AND l_shipmode = 'AIR'"),
        ("lineitem_v1", "l_shipdate >= '1995-06-01'", "l_shipdate >= DATE '1995-06-01'"),
        ("lineitem_v1", "l_comment LIKE 'car%'", "l_comment LIKE 'car%'"),
        ("nulls", "value IS NULL OR id NOT IN (4, 8)", "value IS NULL OR id NOT IN (4, 8)"),
        ("filter", "id > 1 AND value = 'bar'", "id > 1 AND value = 'bar'"),
    ],
)
def test_filters_leave_what_duckdb_leaves(
    name: str, row_filter: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same predicate in SQL finds as many rows; as an exclusion it leaves those for which it is not true."""
    table = opened(name, monkeypatch)
    snapshot = snapshot_of(table, None)
    rows = live_rows(table)
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        found = connection.execute(f"SELECT count(*) FROM rows WHERE {where}").fetchone()
    kept = live_positions(row_groups_of(table, snapshot.snapshot_id, row_filter))
    left = live_positions(row_groups_of(table, snapshot.snapshot_id, "", exclude=[row_filter]))
    assert found == (sum(map(len, kept.values())),)
    assert sum(map(len, left.values())) == len(rows) - sum(map(len, kept.values()))
