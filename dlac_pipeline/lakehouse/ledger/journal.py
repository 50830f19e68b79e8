"""The journal of the ledger: each committed append once more, in files that no table names. See docs/design/0024-journal.md."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
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
from dlac_pipeline.lakehouse.iceberg.metadata_files import resolve
from dlac_pipeline.lakehouse.iceberg.relocation import raw_path
from dlac_pipeline.lakehouse.ledger.arrow_rows import CONSUMPTION_ARROW
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION, ledger_uuid_of

_log = logging.getLogger(__name__)
_ENTRY = re.compile(r"([^/]+)/(\d+)(?:-(\d+))?\.parquet")
_FORMAT = ds.ParquetFileFormat()
_UUID = "dlac.ledger-uuid"
_WRITING = {"compression": "zstd", "write_statistics": False, "use_dictionary": False, "store_schema": False}
"""Options of small files: 4.5 KB instead of 9.5."""
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="journal")
"""The writer of entries in an object store, so that no commit waits for a second request."""
_WARNED: set[str] = set()
Seqs = Mapping[str, Iterable[int]]
"""Run -> the `seq`s of appends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file with the rows of one append of a run, or of successive ones."""

    path: str
    seqs: range


class Journal:
    """The journal at an address: the files `RUN/SEQ.parquet` and `RUN/FIRST-LAST.parquet`, with rows as recorded."""

    def __init__(self, io: FileIO, address: str) -> None:
        """Raises `LakehouseError` for a warehouse that pyarrow does not read."""
        self.address = address
        self._files, self._folder = resolve(io, address)

    @classmethod
    def of(cls, table: Table) -> "Journal":
        """Return the journal in the location of the ledger table."""
        return cls(table.io, journal_address(table.location()))

    def entries(self, run: str = "") -> dict[str, list[Entry]]:
        """Return run -> its entries in order of their first `seq`, of one run or of all, by one listing."""
        selector = FileSelector(f"{self._folder}/{run}".rstrip("/"), allow_not_found=True, recursive=True)
        found: dict[str, list[Entry]] = {}
        for path in sorted(info.path for info in self._files.get_file_info(selector)):
            match = _ENTRY.fullmatch(path.removeprefix(f"{self._folder}/"))
            if match:
                seqs = range(int(match[2]), int(match[3] or match[2]) + 1)
                found.setdefault(match[1], []).append(Entry(path=path, seqs=seqs))
        return found

    def address_of(self, entry: Entry) -> str:
        """Return the address of an entry."""
        return self.address + entry.path.removeprefix(self._folder)

    def write(self, rows: pa.Table, ledger_uuid: str) -> None:
        """Write the rows of successive appends of one run as one entry, which replaces one of the same name."""
        first, last = pc.min_max(rows["seq"]).as_py().values()
        name = f"{first:012}" if first == last else f"{first:012}-{last:012}"
        path, sink = f"{self._folder}/{rows['run'][0].as_py()}/{name}.parquet", pa.BufferOutputStream()
        with pq.ParquetWriter(sink, CONSUMPTION_ARROW, **_WRITING) as writer:
            writer.write_table(rows.cast(CONSUMPTION_ARROW))
            writer.add_key_value_metadata({_UUID: ledger_uuid})
        if isinstance(self._files, LocalFileSystem):
            make_folder_durably(Path(path).parent)
            write_durably(Path(path), sink.getvalue())
        else:
            with self._files.open_output_stream(path) as stream:
                stream.write(sink.getvalue())

    def read(self, entries: Mapping[str, Sequence[Entry]], wanted: Seqs) -> pa.Table:
        """Return the rows of the appends in `wanted`, each once. Raises `LedgerError` for an entry that cannot be read."""
        whole, parts = [], []
        for run, seqs in wanted.items():
            left = set(seqs)
            for entry in entries.get(run, ()):
                new = left.intersection(entry.seqs)
                if new:
                    fragment = _FORMAT.make_fragment(entry.path, self._files)
                    whole += [fragment] if len(new) == len(entry.seqs) else []
                    parts += [] if len(new) == len(entry.seqs) else [(fragment, pc.field("seq").isin(list(new)))]
                    left -= new
        try:
            found = [ds.FileSystemDataset(whole, CONSUMPTION_ARROW, _FORMAT).to_table()]
            found += [fragment.to_table(CONSUMPTION_ARROW, filter=condition) for fragment, condition in parts]
        except (pa.ArrowException, FileNotFoundError) as err:
            raise LedgerError(
                f"expected entries of the journal {self.address!r}, found {err}: restore that file from a backup, or move it away"
            ) from err
        rows = pa.concat_tables(found)
        if (pc.max(rows["format_version"]).as_py() or 0) > FORMAT_VERSION:
            raise FormatTooNew(
                f"the journal {self.address!r} has a newer format, this DLAC reads up to {FORMAT_VERSION}: upgrade DLAC"
            )
        return rows

    def ledger_uuid(self, entry: Entry) -> str:
        """Return the identity of the ledger that an entry is of. Empty if it is unknown."""
        metadata = pq.read_schema(self._files.open_input_file(entry.path)).metadata or {}
        return str(metadata.get(_UUID.encode(), b"").decode())


def journal_address(location: str) -> str:
    """Return the address of the journal of a ledger table at `location`."""
    return f"{location.rstrip('/')}/journal"


def record_append(table: Table, rows: pa.Table) -> None:
    """Write the entry of an append that `table` has. A failure is logged once, and the next claim or upkeep writes the entry."""
    if raw_path(table.location()) is not None:
        _write_entry(table, rows)
    else:
        with suppress(RuntimeError):  # this process is about to exit
            _WRITER.submit(_write_entry, table, rows)


def _write_entry(table: Table, rows: pa.Table) -> None:
    try:
        Journal.of(table).write(rows, ledger_uuid_of(table))
    except Exception as err:  # the append is committed all the same
        address = journal_address(table.location())
        if address not in _WARNED:
            _log.warning(
                "expected to write the journal %s, found %r: the append is committed, and the next claim or `dlac upkeep` "
                "writes its entry; free, mount or permit that folder",
                *(address, err),
            )
        _WARNED.add(address)


def seqs_by_run(rows: pa.Table) -> dict[str, set[int]]:
    """Return run -> the `seq`s of its appends, from rows of the ledger."""
    pairs = rows.group_by(["run", "seq"]).aggregate([])
    found: dict[str, set[int]] = {}
    for run, seq in zip(pairs["run"].to_pylist(), pairs["seq"].to_pylist(), strict=True):
        found.setdefault(run, set()).add(seq)
    return found


def covered(entries: Iterable[Entry]) -> set[int]:
    """Return the `seq`s of the appends that entries have."""
    return set().union(*(entry.seqs for entry in entries))
