"""Versions of a Hudi table: the base files of an instant, as the library hudi finds them.

The number of a version is the timestamp of its instant. Files have all columns of their rows, so there are no partition
values. Rows in log files have no position, so a table with such rows is refused until it is compacted.
"""

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
from hudi import HudiReadOptions, HudiTableBuilder
from pyiceberg.io import FileIO

from dlac_pipeline.extensions.formats.mirror import MirroredFormat
from dlac_pipeline.extensions.formats.versions import ExternalFile, ExternalVersion
from dlac_pipeline.lakehouse.errors import LakehouseError, NoSuchSnapshot, NoSuchTable, UnsupportedSnapshot
from dlac_pipeline.lakehouse.iceberg.data_files import check_stays
from dlac_pipeline.lakehouse.iceberg.deletes import NO_ROWS

_REFUSED = {"hoodie.datasource.write.drop.partition.columns": "false", "hoodie.bootstrap.base.path": ""}
"""Options with the values that leave all columns in the files."""


class HudiSource:
    """A Hudi table at a location."""

    def __init__(self, location: str, options: Mapping[str, str], _: FileIO) -> None:
        self._location = location
        try:
            self._table = HudiTableBuilder.from_base_uri(location).with_storage_options(dict(options)).build()
            self._timeline = self._table.get_timeline()
            found = [
                *self._timeline.get_completed_commits(),
                *self._timeline.get_completed_deltacommits(),
                *self._timeline.get_completed_replacecommits(),
            ]
        except Exception as err:  # the library exports no class of error
            kind = NoSuchTable if "not found" in str(err) else LakehouseError
            raise kind(f"expected a Hudi table at {location!r}, found {err}: correct source.table") from err
        if not found:
            raise NoSuchTable(
                f"expected a Hudi table with rows at {location!r}, found no completed instant: write some"
            )
        self._instants = {int(instant.timestamp): instant for instant in found}
        self.newest, self.table_id = max(self._instants), str(self._table.table_name)

    def numbers(self, after: int, until: int) -> Sequence[int]:
        """Return the versions after one version, up to and with another."""
        return sorted(number for number in self._instants if after < number <= until)

    def read(self, number: int) -> ExternalVersion:
        """Return a version. Raises `NoSuchSnapshot`, and `UnsupportedSnapshot` if it cannot be read exactly."""
        if number not in self._instants:
            raise NoSuchSnapshot(
                f"expected a completed instant {number} in the Hudi table at {self._location!r}, found "
                f"{sorted(self._instants)[-10:]!r}: name one of these as source.version"
            )
        instant = self._instants[number]
        metadata = json.loads(self._timeline.get_instant_metadata_in_json(instant))
        return ExternalVersion(
            number=number,
            schema=pa.schema(self._table.get_schema_with_meta_fields()),
            partition_columns=(),
            files=self._files(instant.timestamp),
            only_rewrites=str(metadata.get("operationType")).upper() == "CLUSTER",
        )

    def _files(self, timestamp: str) -> tuple[ExternalFile, ...]:
        slices = self._table.get_file_slices(HudiReadOptions().with_as_of_timestamp(timestamp))
        options = self._table.hudi_options()
        found = [
            f"{name} = {options[name]}" for name, needed in _REFUSED.items() if options.get(name, needed) != needed
        ]
        found += ["log files: compact the table first"] if any(each.has_log_files() for each in slices) else []
        paths = [f"{self._location}/{each.base_file_relative_path()}" for each in slices]
        for path in paths:
            check_stays(path, f"instant {timestamp} of the Hudi table {self._location!r}")
        found += [f"base file {path!r}" for path in paths if not path.endswith(".parquet")][:1]
        if found:
            raise UnsupportedSnapshot(
                f"expected only Parquet files with all columns in instant {timestamp} of the Hudi table {self._location!r}, "
                f"found {'; '.join(found)}"
            )
        sizes = [each.base_file_size for each in slices]  # its number of rows is an estimate
        return tuple(
            ExternalFile(path=path, bytes=size, rows=None, partition=(), dead=NO_ROWS)
            for path, size in zip(paths, sizes, strict=True)
        )


HUDI = MirroredFormat(HudiSource)
