"""Rebuild of DLAC's tables after a loss: the ledger from its journal, the others from their newest metadata files.

In: a lakehouse that was opened as `damaged`. Out: `Rebuilt`. No file is deleted or renamed. See docs/design/0024-journal.md.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

from dlac_pipeline.checkpoint.manifest import content_digest, parse_manifest
from dlac_pipeline.checkpoint.store import MANIFEST
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.connect import TABLE_PROPERTIES, Lakehouse, among, reachable
from dlac_pipeline.lakehouse.iceberg.metadata_files import metadata_files, version_of
from dlac_pipeline.lakehouse.iceberg.own_rows import read_rows
from dlac_pipeline.lakehouse.ledger import journal as journals
from dlac_pipeline.lakehouse.ledger import older_ledger, run_rows, schemas, typed_rows
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns, parse_rows
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, fence_property, recorded_rows
from dlac_pipeline.lakehouse.ledger.plans import append_own
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, LedgerRow
from dlac_pipeline.lakehouse.maintenance.expiry import committing
from dlac_pipeline.lakehouse.retrying import rereading, retrying
from dlac_pipeline.lakehouse.store_files import StoreFiles, is_local, path_at
from dlac_pipeline.supervise.liveness.launch_liveness import liveness_of
from dlac_pipeline.supervise.retry_policy import LOST_AFTER_S

_LEDGER = "consumption"


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuiltRun:
    """Result for one run."""

    run: str
    appends: int
    """Appends that the ledger has after the rebuild."""
    missing: int
    """Appends that it lacked."""
    problem: str = ""
    """Reason why the run is not complete, with the thing to do. Empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """Result of a rebuild, or of its rehearsal."""

    dry_run: bool
    tables: dict[str, str]
    """Table -> what happened to it."""
    runs: tuple[RebuiltRun, ...]

    def to_json(self) -> dict[str, Any]:
        """This result as plain data."""
        return {**asdict(self), "runs": [asdict(each) for each in self.runs]}


def rebuild_ledger(
    lakehouse: Lakehouse, *, journal: str | None = None, dry_run: bool = False, files: StoreFiles | None = None
) -> Rebuilt:
    """Append what the journal has and the ledger lacks, in one commit, and restore lost tables. Repeating it changes nothing.

    `journal` is the address of a journal in another place. `files` has the credentials of the checkpoint store.

    Raises:
        BadInput: there is no entry at the address of the journal. Nothing was changed. So it is with `RunBusy` and `LedgerError`.
        RunBusy: a launch of a run that lacks appends is alive.
        LedgerError: an entry cannot be read.
    """
    table = _load(lakehouse, _LEDGER)
    table = (
        table if table is not None and table.metadata.snapshots else None
    )  # a catalog that was made again has an empty one
    location, io = _place(lakehouse, journal) if table is None else (table.location(), table.io)
    loss = _Loss(lakehouse, table, journals.Journal(io, journal or journals.journal_address(location)))
    loss.check_idle()
    found = {run: loss.lost_append(run, files or older_ledger.lakehouse_store(lakehouse)) for run in loss.runs()}
    extra = {run: rows for run, (rows, _) in found.items() if rows is not None}
    tables = {
        name: _restore(lakehouse, name, f"{location.rpartition('/')[0]}/{name}", dry_run=dry_run)
        for name in schemas.TABLES
        if name != _LEDGER
    }
    tables[_LEDGER] = "kept" if table is not None else "made again"
    if not dry_run:
        if table is None:
            _make_again(lakehouse, location, loss.uuid)
        loss.append(extra)
    runs = [
        RebuiltRun(
            run=run,
            appends=len(loss.known.get(run, ())) + len(loss.missing.get(run, ())) + (run in extra),
            missing=len(loss.missing.get(run, ())) + (run in extra),
            problem=found[run][1],
        )
        for run in loss.runs()
    ]
    return Rebuilt(dry_run=dry_run, tables=tables, runs=tuple(runs))


class _Loss:
    """The appends that the journal has and the ledger lacks. `table` is the ledger as far as it can be read."""

    def __init__(self, lakehouse: Lakehouse, table: Table | None, journal: journals.Journal) -> None:
        self._lakehouse = lakehouse
        self._table = table
        self._journal = journal
        with reachable(lakehouse.config.uri):
            self._entries = journal.entries()
        if not self._entries:
            raise errors.BadInput(
                f"expected entries RUN/SEQ.parquet of the ledger's journal in {journal.address!r}, found none; nothing was "
                "changed: name the lakehouse with --home or --spec, or the address of the journal with --journal"
            )
        self.uuid = journal.ledger_uuid(max(self._entries.values(), key=len)[-1]) or str(uuid4())
        self.known = (
            {} if table is None else journals.seqs_by_run(read_rows(table, AlwaysTrue(), columns=("run", "seq")))
        )
        written = {run: journals.covered(entries) for run, entries in self._entries.items()}
        self._gaps = {
            run: sorted(set(range(1, max(seqs) + 1)).difference(seqs, self.known.get(run, ())))
            for run, seqs in written.items()
        }
        self.missing = {
            run: lacking
            for run, seqs in written.items()
            if (lacking := seqs.difference(self.known.get(run, ()))) and not self._gaps[run]
        }
        rows = [journal.read(self._entries, self.missing)]
        kinds = typed_rows.names_of_kinds(HEAD_KINDS)
        rows = [each.filter(pc.is_in(each["kind"], pa.array(kinds))) for each in rows]
        rows += [] if table is None else [read_rows(table, among("kind", kinds))]
        self._rows: dict[str, list[LedgerRow]] = defaultdict(list)
        for row in Ledger(lakehouse).translate(parse_rows(pa.concat_tables(rows, promote_options="default"))):
            self._rows[row.run].append(row)

    def runs(self) -> list[str]:
        """Return the runs of the ledger and of the journal."""
        return sorted({*self.known, *self._entries})

    def check_idle(self) -> None:
        """Raise `RunBusy` if a launch of a run that lacks appends is alive."""
        for run in self.missing:
            rows = self._rows[run]
            attempt = run_rows.fence_of_rows(rows).attempt
            launch = liveness_of(rows, attempt)
            if not run_rows.finished_of_rows(rows) and launch.alive(lost_after_s=LOST_AFTER_S):
                raise errors.RunBusy(
                    f"expected no launch of run {run!r} during a rebuild of the ledger, found that attempt {attempt} on node "
                    f"{launch.host!r} is alive; nothing was changed: stop it, or wait for {LOST_AFTER_S:.0f} s if it is gone"
                )

    def lost_append(self, run: str, files: StoreFiles) -> tuple[pa.Table | None, str]:
        """Return the rows of a run's last append as its manifest repeats them, if only the store has it, and a problem."""
        if self._gaps.get(run):
            return None, (
                f"expected every append of the run in the journal, found none with seq {self._gaps[run][:5]!r}: restore those "
                f"files in {self._journal.address}/{run}, or a newer backup of the catalog, and repeat the command"
            )
        rows = self._rows[run]
        for folder in older_ledger.folders_of(rows):
            try:
                proofs = older_ledger.lost_in_store(self.uuid, run, folder, files, rows=rows)
                if proofs:
                    proof = max(proofs, key=lambda each: each.step or 0)
                    return _append_of(self._lakehouse, rows, folder, proof.checkpoint_id, files), ""
            except (errors.StoreUnavailable, errors.SpecInvalid) as err:
                return None, f"the checkpoint store was not compared: {err}"
            except (errors.DlacError, FileNotFoundError) as err:
                return (
                    None,
                    f"the store has a committed checkpoint that the journal lacks, and it cannot be restored: {err}",
                )
        return None, ""

    def append(self, extra: Mapping[str, pa.Table]) -> None:
        """Append the missing rows, and those of `extra`, in one commit. Fences are read from the rows after that."""

        def once() -> None:
            table = self._lakehouse.own(_LEDGER)
            known = journals.seqs_by_run(read_rows(table, AlwaysTrue(), columns=("run", "seq")))
            missing = {run: set(seqs).difference(known.get(run, ())) for run, seqs in self.missing.items()}
            lost = [rows for run, rows in extra.items() if rows["seq"][0].as_py() not in known.get(run, ())]
            rows = pa.concat_tables([self._journal.read(self._entries, missing), *lost])
            if not len(rows):
                return
            stale = {fence_property(run) for run in pc.unique(rows["run"]).to_pylist()} & table.properties.keys()
            with committing(self._lakehouse, table) as transaction:
                transaction.append(rows)
                if stale:
                    transaction.remove_properties(*stale)
                if schemas.ledger_uuid_of(table) != self.uuid:
                    transaction.set_properties({schemas.LEDGER_UUID_PROPERTY: self.uuid})
            for each in lost:
                journals.record_append(table, each)

        retrying()(once)


def _append_of(
    lakehouse: Lakehouse, rows: list[LedgerRow], folder: str, checkpoint_id: str, files: StoreFiles
) -> pa.Table:
    """Return the rows of the append that committed a checkpoint, from its manifest. `rows` are those before it."""
    run, before = rows[-1].run, run_rows.fence_of_rows(rows)
    named = f"/step-{checkpoint_id.removeprefix(f'{run}-')}"
    known = list(run_rows.checkpoint_rows(rows).values())
    places = [each for each in older_ledger.unnamed_folders(folder, files, known) if each.endswith(named)]
    if not places:
        raise errors.CheckpointDamaged(f"expected the folder of checkpoint {checkpoint_id!r} in {folder!r}, found none")
    place = f"{places[0]}/{MANIFEST}"
    content = files.read(place)
    manifest = parse_manifest(content, origin=place)
    if manifest.parent != before.head:
        raise errors.HeadMoved(f"expected its parent to be the head {before.head!r}, found {manifest.parent!r}")
    own = [row for row in parse_columns(manifest.ledger_rows) if not row.seq]
    uri = path_at(place).resolve().as_uri() if is_local(place) else place
    facts: dict[str, Any] = {"manifest_uri": uri, "manifest_digest": content_digest(content)}
    facts |= {"model_digest": manifest.model_digest, "bytes": sum(entry.bytes for entry in manifest.files)}
    appended = [replace(row, **facts) if isinstance(row, CheckpointRow) else row for row in own]
    nonce = checkpoint_id.rpartition("-")[2]
    fence = run_rows.Fence(attempt=manifest.attempt, nonce=nonce, seq=before.seq + 1, head=checkpoint_id)
    return recorded_rows(lakehouse, run, fence, appended)


def _load(lakehouse: Lakehouse, name: str) -> Table | None:
    """Return an own table, or None if it is gone, or if a file that it names is gone or is no such file."""

    def once() -> Table:
        table = lakehouse.load(f"{lakehouse.config.namespace}.{name}")
        read_rows(table, AlwaysTrue(), columns=table.schema().column_names[:1])
        return table

    lost = (errors.NoSuchTable, errors.MetadataLost, errors.LedgerOlderThanStore, FileNotFoundError, ValueError)
    with reachable(lakehouse.config.uri), suppress(*lost):
        return rereading()(once)
    return None


def _place(lakehouse: Lakehouse, journal: str | None) -> tuple[str, FileIO]:
    """Return the location of a lost or damaged ledger table, and its file I/O."""
    with suppress(errors.NoSuchTable, errors.MetadataLost, errors.LedgerOlderThanStore):
        table = lakehouse.load(f"{lakehouse.config.namespace}.{_LEDGER}")
        return table.location(), table.io
    if isinstance(lakehouse.catalog, MetastoreCatalog):
        location = lakehouse.catalog._get_default_warehouse_location(lakehouse.config.namespace, _LEDGER)
        return location, lakehouse.file_io(location)
    if journal is None:
        raise errors.BadInput(
            f"expected the table of the ledger in the catalog at {lakehouse.config.address!r}, found none, and only its server "
            "knows where it was: name the folder `journal` in the table's location with --journal"
        )
    location = journal.rstrip("/").removesuffix("/journal")
    return location, lakehouse.file_io(location)


def _make_again(lakehouse: Lakehouse, location: str, uuid: str) -> None:
    """Make an empty ledger table in place of a lost one, with its uuid, or with a property that names it."""
    catalog, name, (schema, spec) = (
        lakehouse.catalog,
        f"{lakehouse.config.namespace}.{_LEDGER}",
        schemas.TABLES[_LEDGER],
    )
    with reachable(lakehouse.config.uri):
        with suppress(NoSuchTableError):
            catalog.drop_table(name)
        if not isinstance(catalog, MetastoreCatalog):  # its server alone writes metadata files
            properties = {**TABLE_PROPERTIES, schemas.LEDGER_UUID_PROPERTY: uuid}
            catalog.create_table(name, schema, partition_spec=spec, properties=properties)
            return
        io = lakehouse.file_io(location)
        version = max(map(version_of, metadata_files(io, f"{location}/metadata")), default=-1) + 1
        place = f"{location}/metadata/{version:05}-{uuid4()}.metadata.json"
        metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, location, TABLE_PROPERTIES, UUID(uuid))
        ToOutputFile.table_metadata(metadata, io.new_output(place))
        catalog.register_table(name, place)


def _restore(lakehouse: Lakehouse, name: str, location: str, *, dry_run: bool) -> str:
    """Give a table that is no ledger the rows of its newest metadata file. Return what happened. `location` is for a lost one."""
    table, identifier = _load(lakehouse, name), f"{lakehouse.config.namespace}.{name}"
    io = lakehouse.file_io(location) if table is None else table.io
    location = location if table is None else table.location()
    log = (
        ()
        if table is None
        else (table.metadata_location, *(each.metadata_file for each in table.metadata.metadata_log))
    )
    unnamed = [place for place in metadata_files(io, f"{location}/metadata") if place not in log]
    for place in unnamed:
        with suppress(FileNotFoundError, ValueError):
            lost = StaticTable.from_metadata(place, io.properties)
            rows = read_rows(lost, AlwaysTrue())
            break
    else:
        return "kept" if table is not None else "made again, empty"
    if table is None or not table.metadata.snapshots:
        if not lost.metadata.snapshots and table is not None:
            return "kept"
        if not dry_run:
            with reachable(lakehouse.config.uri):
                with suppress(NoSuchTableError):
                    lakehouse.catalog.drop_table(identifier)
                lakehouse.catalog.register_table(identifier, lost.metadata_location)
        return f"{len(rows)} rows restored"
    lacking = _difference(rows, read_rows(table, AlwaysTrue()))
    if len(lacking) and not dry_run:
        append_own(lakehouse, name, lacking, unless=lambda: not len(_difference(rows, lakehouse.read_own(name))))
    return f"{len(lacking)} rows added" if len(lacking) else "kept"


def _difference(rows: pa.Table, known: pa.Table) -> pa.Table:
    """Return the rows that are not among the known ones, in the schema of those."""
    import duckdb  # it takes 0.2 s to import

    rows = pa.concat_tables([known.slice(0, 0), rows], promote_options="default").select(known.column_names)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", rows)
        connection.register("known", known)
        found: pa.Table = connection.sql("FROM rows EXCEPT FROM known").to_arrow_table()
    return found.cast(known.schema)
