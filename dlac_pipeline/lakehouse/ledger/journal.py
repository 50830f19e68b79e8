"""The journal of the ledger: each committed append once more, in files that no table names. See docs/design/0024-journal.md."""

import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, LocalFileSystem
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.durable_io import make_folder_durably, write_durably
from dlac_pipeline.lakehouse.errors import FormatTooNew, LedgerError
from dlac_pipeline.lakehouse.iceberg.metadata_files import JOURNAL, resolve
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path
from dlac_pipeline.lakehouse.ledger.arrow_rows import CONSUMPTION_ARROW
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION, LEDGER_UUID_PROPERTY, ledger_uuid_of
from dlac_pipeline.lakehouse.retrying import may_pass

_log = logging.getLogger(__name__)
_ENTRY = re.compile(r"/([^/_][^/]*)/(\d+)\.parquet")
_LAST = "_last"
"""Folder with a file for each run that has the number of its last append. No run has such a name."""
_FORMAT = ds.ParquetFileFormat()
_WRITING = {"compression": "zstd", "write_statistics": False, "use_dictionary": False, "store_schema": False}
"""Options of small files. Columns without values are left out, too."""
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="journal")
"""The writer of entries in an object store, so that no commit waits for a second request."""
WARNED: set[str] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The content of an entry."""

    rows: pa.Table
    seqs: dict[str, set[int]]
    """Run -> the `seq`s of its rows. An intact entry has one run with one."""
    ledger_uuid: str

    def is_of(self, run: str, seq: int) -> bool:
        """Return True if the entry is the append of a run with this number."""
        return self.seqs == {run: {seq}}


class Journal:
    """The journal at an address: `RUN/SEQ.parquet` has the rows of an append as the table records them."""

    def __init__(self, io: FileIO, address: str) -> None:
        """Raises `LakehouseError` for a warehouse that pyarrow does not read."""
        self.address = address
        self._files, self._folder = resolve(io, address)

    @classmethod
    def of(cls, table: Table) -> "Journal":
        """Return the journal in the data folder of the ledger table, the one folder that table buckets let clients use."""
        return cls(table.io, journal_address(table))

    def entries(self, run: str = "") -> dict[str, dict[int, str]]:
        """Return run -> `seq` -> path of the entry, of one run or of all, by one listing."""
        selector = FileSelector(f"{self._folder}/{run}".rstrip("/"), allow_not_found=True, recursive=True)
        found: dict[str, dict[int, str]] = {}
        for info in self._files.get_file_info(selector):
            if match := _ENTRY.fullmatch(info.path.removeprefix(self._folder)):
                found.setdefault(match[1], {})[int(match[2])] = info.path
        return found

    def address_of(self, path: str) -> str:
        """Return the address of an entry."""
        return self.address + path.removeprefix(self._folder)

    def write(self, rows: pa.Table, ledger_uuid: str) -> None:
        """Write the entry of an append, which replaces an earlier one."""
        run, seq = rows["run"][0].as_py(), rows["seq"][0].as_py()
        path, sink = f"{self._folder}/{run}/{seq:012}.parquet", pa.BufferOutputStream()
        rows = rows.select(CONSUMPTION_ARROW.names).cast(CONSUMPTION_ARROW)
        rows = rows.select([name for name in rows.column_names if rows[name].null_count < len(rows)])
        with pq.ParquetWriter(sink, rows.schema, **_WRITING) as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({LEDGER_UUID_PROPERTY: ledger_uuid})
        if isinstance(self._files, LocalFileSystem):
            make_folder_durably(Path(path).parent)
            write_durably(Path(path), sink.getvalue())
        else:
            with self._files.open_output_stream(path) as stream:
                stream.write(sink.getvalue())

    def write_last(self, run: str, seq: int) -> None:
        """Record the number of a run's last append. It proves an append whose entry is lost, and so is not synced."""
        path = f"{self._folder}/{_LAST}/{run}"
        if isinstance(self._files, LocalFileSystem):
            Path(path).parent.mkdir(exist_ok=True)
        with self._files.open_output_stream(path) as stream:
            stream.write(str(seq).encode())

    def last_seqs(self) -> dict[str, int]:
        """Return run -> the number of its last append, where it is recorded."""
        found = {}
        for info in self._files.get_file_info(FileSelector(f"{self._folder}/{_LAST}", allow_not_found=True)):
            with suppress(ValueError), self._files.open_input_stream(info.path) as stream:
                found[info.base_name] = int(stream.read())
        return found

    def read(self, paths: Iterable[str]) -> pa.Table:
        """Return the rows of entries. Raises `LedgerError` for an entry that cannot be read, or `FormatTooNew`."""
        fragments = [_FORMAT.make_fragment(path, self._files) for path in paths]
        try:
            rows = ds.FileSystemDataset(fragments, CONSUMPTION_ARROW, _FORMAT).to_table()
        except (pa.ArrowException, OSError) as err:
            raise self._damaged(err) from err
        if (pc.max(rows["format_version"]).as_py() or 0) > FORMAT_VERSION:
            raise FormatTooNew(
                f"the journal {self.address!r} has a newer format, this DLAC reads up to {FORMAT_VERSION}: upgrade DLAC"
            )
        return rows

    def read_entry(self, path: str) -> Entry:
        """Return one entry. Raises as `read`."""
        rows = self.read([path])
        return Entry(seqs=seqs_by_run(rows), rows=rows, ledger_uuid=self.ledger_uuid(path))

    def ledger_uuid(self, path: str) -> str:
        """Return the identity of the ledger that an entry is of. Empty for another Parquet file. Raises as `read`."""
        try:
            with self._files.open_input_file(path) as stream:
                metadata = pq.read_schema(stream).metadata or {}
        except (pa.ArrowException, OSError) as err:
            raise self._damaged(err) from err
        return str(metadata.get(LEDGER_UUID_PROPERTY.encode(), b"").decode())

    def _damaged(self, err: Exception) -> Exception:
        """Return the error for an entry that cannot be read, or the error of an outage."""
        if isinstance(err, OSError) and may_pass(err) and not isinstance(err, FileNotFoundError):
            return err
        return LedgerError(
            f"expected entries of the journal {self.address!r}, found {err}: restore that file from a backup, or move it away"
        )


def record_appends(table: Table, *appends: pa.Table, newest: bool = False) -> None:
    """Write the entries of appends that `table` has, until one fails. The failure is logged once, and the next claim retries.

    `newest`: the last one is the last append of its run.
    """
    if raw_path(table.location()) is not None:
        _write_entries(table, appends, newest)
    else:
        with suppress(RuntimeError):  # this process is about to exit
            _WRITER.submit(_write_entries, table, appends, newest)


def _write_entries(table: Table, appends: Sequence[pa.Table], newest: bool) -> None:
    try:
        journal, uuid = Journal.of(table), ledger_uuid_of(table)
        for rows in appends:
            journal.write(rows, uuid)
        if newest:
            journal.write_last(appends[-1]["run"][0].as_py(), appends[-1]["seq"][0].as_py())
    except Exception as err:  # the append is committed all the same
        address = journal_address(table)
        if address not in WARNED:
            _log.warning(
                "expected to write the journal %s, found %r: the append is committed, and the next claim or `dlac ledger upkeep` "
                "writes its entry; free, mount or permit that folder",
                *(address, err),
            )
        WARNED.add(address)


def seqs_by_run(rows: pa.Table) -> dict[str, set[int]]:
    """Return run -> the `seq`s of its appends, from rows of the ledger."""
    pairs = rows.group_by(["run", "seq"]).aggregate([])
    found: dict[str, set[int]] = {}
    for run, seq in zip(pairs["run"].to_pylist(), pairs["seq"].to_pylist(), strict=True):
        found.setdefault(run, set()).add(seq)
    return found


def journal_address(table: Table) -> str:
    """Return the address of the journal of a ledger table."""
    return f"{table.location_provider().data_path}/{JOURNAL}"
