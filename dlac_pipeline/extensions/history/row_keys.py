"""Keys of rows: digests of identity columns or v3 row ids, by which a document is found after its data files are gone.

In: data files of a table. Out: rows of the own table `row_keys`, sorted by key. A file is keyed once, however many plans name it.
"""

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import _dataframe_to_data_files, schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import LongType, NestedField, UUIDType

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, SpecInvalid
from dlac_pipeline.lakehouse.files.open_file import open_file
from dlac_pipeline.lakehouse.iceberg.columns import READ_BY_NAME, FileColumns, arrow_type, expect, name_mapping_of
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY, Lakehouse, among
from dlac_pipeline.lakehouse.iceberg.data_files import ROW_ID_FIELD_ID, LiveFile, live_files
from dlac_pipeline.lakehouse.ledger.schemas import ROW_KEYS
from dlac_pipeline.lakehouse.maintenance.expiry import committing
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.rows.columns import check_identity
from dlac_pipeline.spec.job_spec import SourceSpec

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection  # whose import costs each launch time, and its end a page of warnings

ROW_ID = NestedField(ROW_ID_FIELD_ID, "_row_id", LongType(), required=False)
"""The reserved field in which a rewritten file of format v3 keeps its rows' ids."""
_ARROW = schema_to_pyarrow(ROW_KEYS, include_field_ids=False)
_FILE_BATCHES = 16  # of 122,880 rows: about 24 MB, which upkeep does not merge


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of rows: the identity columns of `schema`, or v3 row ids where `columns` is empty."""

    schema: Schema
    columns: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[Schema, tuple[str, ...]]:
        """The schema and the columns in it that are read of each file."""
        return (self.schema, self.columns) if self.columns else (Schema(ROW_ID), (ROW_ID.name,))


def identity_keys(schema: Schema, columns: Sequence[str]) -> Keys:
    """Keys of the declared identity columns. Raises as `check_identity`."""
    check_identity(schema, columns)
    return Keys(schema, tuple(columns))


def key_columns(table: Table, file: LiveFile, keys: Keys) -> Iterator[tuple[Ints, list[Any]]]:
    """Yield the keys of all rows of a data file in batches: the positions of the rows, and the columns of their keys."""
    wanted, names = keys.read
    with table.io.new_input(file.path).open() as stream:
        opened = open_file(file.path, stream, wanted.fields)
        columns = FileColumns.of(opened.footer.schema, wanted, names, name_mapping_of(table), file.partition_values)
        first = 0
        for unit, rows in enumerate(opened.footer.rows):
            at = np.arange(first, first + rows)
            found = columns.align(opened.read(unit, columns.in_file), rows).columns
            if not keys.columns and file.first_row_id is not None:  # an id that is not written is that of the place
                found = [pc.coalesce(found[0], pa.array(file.first_row_id + at))]
            yield at, found
            first += rows


@contextmanager
def spilling_duckdb(memory_bytes: int = 1 << 30) -> Iterator["DuckDBPyConnection"]:
    """Yield a connection in memory that puts in a temporary folder what exceeds `memory_bytes`."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="dlac-match-") as folder:
        config = {"memory_limit": f"{memory_bytes >> 20}MB", "temp_directory": folder, "threads": "2"}
        with duckdb.connect(config={**config, "preserve_insertion_order": "false"}) as connection:
            yield connection


class RowKeyWriter:
    """Keys of the rows of a source, as the planner writes them. Raises `SpecInvalid` for a source without any."""

    def __init__(self, lakehouse: Lakehouse, table: Table, schema: Schema, source: SourceSpec) -> None:
        self._lakehouse = lakehouse
        self._table = table
        self._keys = _keys_of(table, schema, source)

    def write(self, snapshot_id: int, paths: set[str], *, older: bool) -> None:
        """Write the keys of a snapshot's data files, as `RowKeys.write` does."""
        from dlac_pipeline.audit.lakehouse_sql import sql_script  # DuckDB costs each launch time

        lakehouse, table, keys = self._lakehouse, self._table, self._keys
        uuid, known = str(table.metadata.table_uuid), paths
        plans = lakehouse.read_own("plans").to_pylist() if older else []
        plans = [each for each in plans if each["table_uuid"] == uuid and table.snapshot_by_id(each["snapshot_id"])]
        if plans:
            wanted = among("write_id", [plan["write_id"] for plan in plans])
            units = lakehouse.read_own("work_units", wanted, columns=("file_path",))
            known = paths.union(units["file_path"].unique().to_pylist())
        # the last one decides, because the table may have been upgraded to v3
        snapshots = [*{plan["snapshot_id"] for plan in plans}, snapshot_id]
        files = {file.path: file for each in snapshots for file in live_files(table, each) if file.path in known}
        fields = [keys.read[0].find_field(name) for name in keys.read[1]]
        with spilling_duckdb() as connection:
            empty = _columns(fields, [pa.array([], arrow_type(each.field_type)) for each in fields])
            kinds = map(str, connection.from_arrow(pa.table(empty)).types)
            identity = json.dumps(dict(zip(keys.read[1], kinds, strict=True)), ensure_ascii=False)
            facts = [uuid, identity, lakehouse.uuid_of_own("row_keys")]
            connection.execute(sql_script("row_key"))
            connection.execute(sql_script("found_keys"), [*facts, list(files)])
            if not _count_unkeyed(lakehouse, connection):
                return
            texts = ", ".join(f"{name}::VARCHAR" for name in empty)
            insert = f"INSERT INTO found BY NAME SELECT $1 AS file, row_key($2, $3, [{texts}]) AS key, row FROM batch"
            for path, number in connection.execute("SELECT file_path, file FROM found").fetchall():
                try:
                    with expect(f"the columns {list(keys.read[1])!r} in {path!r}"):
                        if not keys.columns and files[path].first_row_id is None:
                            raise DataFileUnreadable(
                                f"expected v3 row ids in {path!r}, found none: set identity_columns"
                            )
                        for at, found in key_columns(table, files[path], keys):
                            connection.register("batch", pa.table({"row": at, **_columns(fields, found)}))
                            connection.execute(insert, [number, facts[2], identity])
                except DataFileUnreadable as err:
                    if path in paths:
                        raise
                    logging.getLogger(__name__).warning("%s: its rows have no keys", err)
                    connection.execute("DELETE FROM found WHERE file = ?", [number])
            retrying(600.0)(_append, lakehouse, connection)


def _keys_of(table: Table, schema: Schema, source: SourceSpec) -> Keys:
    """Return the keys of a source's rows: its identity columns, else the identifier fields of its table, else v3 row ids.

    Raises `SpecInvalid` for a source without any of them, or as `identity_keys`.
    """
    identifiers = schema.identifier_field_names()
    named = source.identity_columns or [name for name in schema.column_names if name in identifiers]
    if not named and (table.metadata.format_version < 3 or READ_BY_NAME in table.properties):
        raise SpecInvalid(
            f"expected columns that identify rows of {source.table!r} for their keys, found no identity_columns, identifier "
            "fields or v3 row ids: set source.identity_columns, or leave source.row_keys out"
        )
    return identity_keys(schema, named)


def _append(lakehouse: Lakehouse, connection: Any) -> None:
    own = lakehouse.own("row_keys")  # loaded before the look, so that a later commit makes this append fail
    if not _count_unkeyed(lakehouse, connection):
        return
    with committing(lakehouse, own) as transaction, transaction.update_snapshot().merge_append() as snapshot:
        batches = iter(connection.sql("FROM found ORDER BY key NULLS FIRST").to_arrow_reader())
        while part := list(islice(batches, _FILE_BATCHES)):
            for file in _dataframe_to_data_files(own.metadata, pa.Table.from_batches(part).cast(_ARROW), own.io):
                snapshot.append_data_file(file)


def _count_unkeyed(lakehouse: Lakehouse, connection: Any) -> int:
    """Drop the found files that have keys by now. Return the number of files that are left."""
    connection.register("known", lakehouse.read_own("row_keys", NO_KEY, columns=("file",)))
    connection.execute("DELETE FROM found WHERE file IN (SELECT file FROM known)")
    return int(connection.execute("SELECT count(*) FROM found WHERE key IS NULL").fetchall()[0][0])


def _columns(fields: Sequence[NestedField], columns: Iterable[Any]) -> dict[str, Any]:
    """Return columns as k0, k1 and so on, in types whose texts are the same in each session of DuckDB."""
    named = {}
    for place, (field, column) in enumerate(zip(fields, columns, strict=True)):
        kind = pa.uuid() if isinstance(field.field_type, UUIDType) else column.type
        plain = column.cast(pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind)
        named[f"k{place}"] = (
            pc.add(plain, pa.scalar(0.0, kind)) if pa.types.is_floating(kind) else plain
        )  # -0.0 becomes 0.0
    return named
