"""Versions of a Delta Lake table: live files, partition values and deletion vectors, as the library deltalake reads them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyiceberg.io import FileIO

from dlac_pipeline.extensions.formats.mirror import MirroredFormat
from dlac_pipeline.extensions.formats.versions import ExternalFile, ExternalVersion
from dlac_pipeline.lakehouse.errors import LakehouseError, NoSuchSnapshot, NoSuchTable, UnsupportedSnapshot
from dlac_pipeline.lakehouse.iceberg.data_files import check_stays
from dlac_pipeline.lakehouse.iceberg.deletes import NO_ROWS, Ints

_APPLIED = {"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
_UNUSED = {
    "typeWidening": "delta.typeChanges",
    "typeWidening-preview": "delta.typeChanges",
    "variantType": '"variant"',
    "variantType-preview": '"variant"',
    "variantShredding-preview": '"variant"',
}
"""Reader features that do not matter unless the schema has this text."""


class DeltaSource:
    """A Delta Lake table at a location."""

    def __init__(self, location: str, options: Mapping[str, str], io: FileIO) -> None:
        self._location, self._options, self._io = location, dict(options), io
        table = self._open(None)
        self.newest = table.version()
        self.table_id = str(table.metadata().id)

    def numbers(self, after: int, until: int) -> Sequence[int]:
        """Return the versions after one version, up to and with another."""
        return range(after + 1, until + 1)

    def read(self, number: int) -> ExternalVersion:
        """Return a version. Raises `NoSuchSnapshot`, and `UnsupportedSnapshot` if it cannot be read exactly."""
        table = self._open(number)
        _check_features(table, f"version {number} of the Delta table {self._location!r}")
        columns = tuple(table.metadata().partition_columns)
        return ExternalVersion(
            number=number,
            schema=pa.schema(table.schema().to_arrow()),
            partition_columns=columns,
            files=self._files(table, columns),
            only_rewrites=self._only_rewrites(number),
        )

    def _open(self, number: int | None) -> DeltaTable:
        try:
            return DeltaTable(self._location, version=number, storage_options=self._options)
        except OSError as err:
            raise LakehouseError(f"expected to read the Delta table at {self._location!r}, found {err}") from err
        except DeltaError as err:
            if number is not None:
                raise NoSuchSnapshot(
                    f"expected version {number} of the Delta table at {self._location!r}, found versions up to {self.newest} "
                    f"({err}): name one of these as source.version that its log still has"
                ) from err
            if isinstance(err, TableNotFoundError):
                raise NoSuchTable(
                    f"expected a Delta table at {self._location!r}, found none: correct source.table ({err})"
                ) from err
            raise _unsupported(f"the Delta table {self._location!r}", str(err)) from err

    def _files(self, table: DeltaTable, partition_columns: Sequence[str]) -> tuple[ExternalFile, ...]:
        actions = pa.table(table.get_add_actions(flatten=True))
        dead = self._dead_rows(table)
        values = [_iceberg_values(actions[f"partition.{name}"]) for name in partition_columns] if len(actions) else []
        names = ("path", "size_bytes", "num_records")
        recorded = zip(*(actions[name].to_pylist() for name in names), strict=True)
        found = tuple(
            ExternalFile(
                path=(path := self._path(name)),
                bytes=size,
                rows=rows,
                partition=tuple(column[place] for column in values),
                dead=dead.pop(path, NO_ROWS),
            )
            for place, (name, size, rows) in enumerate(recorded)
        )
        if dead:
            raise _unsupported(f"the Delta table {self._location!r}", f"deletion vectors of other files: {[*dead]!r}")
        return found

    def _dead_rows(self, table: DeltaTable) -> dict[str, Ints]:
        found: dict[str, Ints] = {}
        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return found
        for batch in table.deletion_vectors():
            rows = pa.record_batch(batch)
            for path, kept in zip(rows["filepath"].to_pylist(), rows["selection_vector"], strict=True):
                mask = kept.values.to_numpy(zero_copy_only=False)
                found[unquote(path.removeprefix("file://"))] = np.flatnonzero(~mask).astype(np.int64)
        return found

    def _path(self, recorded: str) -> str:
        """Return the address of a data file. The log has it relative to the table, as part of a URL, or as an absolute URL."""
        path = unquote(recorded)
        check_stays(path, f"the log of the Delta table {self._location!r}")
        if path.startswith("file:/"):
            return f"/{path.removeprefix('file:').lstrip('/')}"
        return path if "://" in path else f"{self._location}/{path}"

    def _only_rewrites(self, number: int) -> bool:
        """Return True if the commit changed files and no rows, as OPTIMIZE does. A commit that is gone counts as a change."""
        try:
            with self._io.new_input(f"{self._location}/_delta_log/{number:020}.json").open() as stream:
                actions = [json.loads(line) for line in stream.read().splitlines() if line.strip()]
        except OSError:
            return False
        changes = [change for action in actions if (change := action.get("add") or action.get("remove"))]
        return not any(change["dataChange"] for change in changes)


DELTA = MirroredFormat(DeltaSource)


def _check_features(table: DeltaTable, name: str) -> None:
    """Check that all features of a version that matter to readers are applied here. Raises `UnsupportedSnapshot`."""
    schema = table.schema().to_json()
    mapping = table.metadata().configuration.get("delta.columnMapping.mode") or "none"
    found = [] if mapping == "none" else [f"columnMapping (mode {mapping!r})"]
    found += [
        feature
        for feature in sorted(set(table.protocol().reader_features or ()) - _APPLIED - {"columnMapping"})
        if _UNUSED.get(feature, "") in schema
    ]
    if found:
        raise _unsupported(name, ", ".join(found))


def _unsupported(name: str, found: str) -> UnsupportedSnapshot:
    return UnsupportedSnapshot(
        f"expected only reader features that DLAC applies ({', '.join(sorted(_APPLIED))}) in {name}, found {found}: train from "
        "a copy of the table without them"
    )


def _iceberg_values(column: pa.ChunkedArray) -> list[Any]:
    """Return partition values as Iceberg stores them: days and microseconds since 1970."""
    if pa.types.is_date(column.type):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_timestamp(column.type):
        return list(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist())
    return list(column.to_pylist())
