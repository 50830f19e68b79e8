"""Rebuild of DLAC's tables after a loss: the ledger from its journal, the others from their newest metadata files.

In: a lakehouse that was opened as `damaged`. Out: a `Rebuilt`. No file is deleted or renamed. See docs/design/0024-journal.md.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update.snapshot import ExpireSnapshots, ManageSnapshots

from dlac_pipeline.checkpoint.manifest import content_digest, parse_manifest
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.connect import TABLE_PROPERTIES, Lakehouse, among, reachable
from dlac_pipeline.lakehouse.iceberg.metadata_files import metadata_files, version_of
from dlac_pipeline.lakehouse.iceberg.own_rows import read_rows
from dlac_pipeline.lakehouse.ledger import arrow_rows, older_ledger, run_rows, schemas, typed_rows
from dlac_pipeline.lakehouse.ledger.journal import Journal, journal_address, record_appends, seqs_by_run
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, fence_property, recorded_rows
from dlac_pipeline.lakehouse.ledger.plans import append_own
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
    problem: str
    """Reason why the run is not complete, with the thing to do. Empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """Result of a rebuild, or of its rehearsal."""

    tables: dict[str, str]
    """Table -> what happened to it."""
    runs: list[RebuiltRun]


def rebuild_ledger(
    lakehouse: Lakehouse, *, journal: str | None = None, dry_run: bool = False, files: StoreFiles | None = None
) -> Rebuilt:
    """Append what the journal has and the ledger lacks, in one commit, and restore lost tables. Repeating it changes nothing.

    `journal` is the address of a journal in another place. `files` has the credentials of the checkpoint store.

    Raises:
        BadInput: no entry is at the address of the journal. Nothing was changed, as with the others.
        RunBusy: a launch of a run that lacks appends is alive.
        LedgerError: an entry cannot be read.
    """
    catalog, named, table = lakehouse.catalog, _named(lakehouse), _load(lakehouse, _LEDGER)
    location, io = _place(lakehouse, journal) if named is None else (named.location(), named.io)
    default = f"{location}/data/journal" if named is None else journal_address(named)
    loss = _Loss(lakehouse, table, Journal(io, journal or default))
    loss.check_idle()
    found = {run: loss.lost_append(run, files or older_ledger.lakehouse_store(lakehouse)) for run in loss.runs}
    extra = {run: rows for run, (rows, _) in found.items() if rows is not None}
    if table is None and named is not None:
        loss.check_rows(named, sum(map(len, extra.values())))
    folder = location.rpartition("/")[0]
    tables = {
        each: _restore(lakehouse, each, f"{folder}/{each}", dry_run) for each in schemas.TABLES if each != _LEDGER
    }
    tables[_LEDGER] = "kept" if table is not None else "made again"
    if not dry_run:
        # a server makes the table itself, and may delete the files of one that is dropped
        if isinstance(catalog, MetastoreCatalog) and (named is None or not named.metadata.snapshots):
            with reachable(lakehouse.config.uri):
                _make_again(catalog, f"{lakehouse.config.namespace}.{_LEDGER}", location, io, loss.uuid)
        loss.append(extra)
    runs = []
    for run in loss.runs:
        missing = len(loss.missing[run]) + (run in extra)
        runs.append(RebuiltRun(run=run, appends=len(loss.known[run]) + missing, missing=missing, problem=found[run][1]))
    return Rebuilt(tables=tables, runs=runs)


class _Loss:
    """The appends that the journal has and the ledger lacks. Without a `table` it lacks all."""

    def __init__(self, lakehouse: Lakehouse, table: Table | None, journal: Journal) -> None:
        self._lakehouse = lakehouse
        self._journal = journal
        with reachable(lakehouse.config.uri):
            self._entries = journal.entries()
        if not self._entries:
            raise errors.BadInput(
                f"expected entries RUN/SEQ.parquet of the ledger's journal in {journal.address!r}, found none; nothing was "
                "changed: name the lakehouse with --home or --spec, or the address of the journal with --journal"
            )
        longest = max(self._entries.values(), key=len)
        self.uuid = journal.ledger_uuid(longest[max(longest)])
        kinds = typed_rows.names_of_kinds(typed_rows.HEAD_KINDS)
        keys = rows = arrow_rows.CONSUMPTION_ARROW.empty_table()
        if table is not None:
            keys, rows = read_rows(table, AlwaysTrue(), columns=("run", "seq")), read_rows(table, among("kind", kinds))
        self.known = defaultdict(set, seqs_by_run(keys))
        self.runs = sorted({*self.known, *self._entries})
        self._gaps = {run: _gaps_in(self.known[run] | self._entries.get(run, {}).keys()) for run in self.runs}
        self.missing = {
            run: set() if self._gaps[run] else self._entries.get(run, {}).keys() - self.known[run] for run in self.runs
        }
        missing = self._read(self.missing)
        self._rows = len(missing)
        missing = missing.filter(pc.is_in(missing["kind"], pa.array(kinds)))
        self._heads: dict[str, list[typed_rows.LedgerRow]] = defaultdict(list)
        heads = arrow_rows.parse_rows(pa.concat_tables([rows, missing], promote_options="default"))
        for row in Ledger(lakehouse).translate(heads):
            self._heads[row.run].append(row)

    def _read(self, wanted: Mapping[str, set[int]]) -> pa.Table:
        return self._journal.read(self._entries[run][seq] for run in wanted for seq in sorted(wanted[run]))

    def check_idle(self) -> None:
        """Raise `RunBusy` if a launch of a run that lacks appends is alive."""
        for run in (each for each in self.runs if self.missing[each]):
            attempt = run_rows.fence_of_rows(self._heads[run]).attempt
            launch = liveness_of(self._heads[run], attempt)
            if not run_rows.finished_of_rows(self._heads[run]) and launch.alive(lost_after_s=LOST_AFTER_S):
                raise errors.RunBusy(
                    f"expected no launch of run {run!r} during a rebuild of the ledger, found that attempt {attempt} on node "
                    f"{launch.host!r} is alive; nothing was changed: stop it, or wait for {LOST_AFTER_S:.0f} s if it is gone"
                )

    def check_rows(self, damaged: Table, more: int) -> None:
        """Raise `LedgerError` if the journal has fewer rows than a table that cannot be read. Nothing may replace it then."""
        snapshot = damaged.current_snapshot()
        summary = None if snapshot is None else snapshot.summary
        recorded = int((summary and summary.additional_properties.get("total-records")) or 0)
        found = self._rows + more
        if found < recorded:
            raise errors.LedgerError(
                f"expected the {recorded} rows of the damaged ledger in the journal {self._journal.address!r}, found {found}; "
                "nothing was changed: restore the lost file of the table, or the missing entries, from a backup"
            )

    def lost_append(self, run: str, files: StoreFiles) -> tuple[pa.Table | None, str]:
        """Return the rows of a run's last append, from its manifest, if only the store has it, and a problem."""
        if self._gaps[run]:
            return None, (
                f"expected every append of the run in the journal, found none with seq {self._gaps[run][:5]!r}: restore those "
                f"files in {self._journal.address}/{run}, or a newer backup of the catalog, and repeat the command"
            )
        rows = self._heads[run]
        for folder in older_ledger.folders_of(rows):
            try:
                proofs = older_ledger.lost_in_store(self.uuid, run, folder, files, rows=rows)
                if proofs:
                    newest = max(proofs, key=lambda each: each.step or 0)
                    return _append_of(self._lakehouse, rows, folder, newest.checkpoint_id, files), ""
            except (errors.StoreUnavailable, errors.SpecInvalid) as err:
                return None, f"the checkpoint store was not compared: {err}"
            except (errors.DlacError, FileNotFoundError) as err:
                return (
                    None,
                    f"the journal lacks a committed checkpoint of the store, and no manifest restores it: {err}",
                )
        return None, ""

    def append(self, extra: Mapping[str, pa.Table]) -> None:
        """Append the missing rows, and those of `extra`, in one commit. Fences are read from the rows after that."""

        def once() -> None:
            table, whole = self._lakehouse.own(_LEDGER), _load(self._lakehouse, _LEDGER)
            keys = None if whole is None else read_rows(whole, AlwaysTrue(), columns=("run", "seq"))
            known = defaultdict(set, {} if keys is None else seqs_by_run(keys))
            lost = [rows for run, rows in extra.items() if rows["seq"][0].as_py() not in known[run]]
            rows = pa.concat_tables([self._read({run: self.missing[run] - known[run] for run in self.runs}), *lost])
            if not len(rows):
                return
            damaged = [each.snapshot_id for each in table.metadata.snapshots] if whole is None else []
            stale = {fence_property(run) for run in self.runs} & table.properties.keys()
            with committing(self._lakehouse, table) as transaction:
                if damaged:  # the next snapshot has no parent, whose manifests may be lost
                    ManageSnapshots(transaction).remove_branch(MAIN_BRANCH).commit()
                transaction.append(rows)
                if damaged:
                    ExpireSnapshots(transaction).by_ids(damaged).commit()
                transaction.remove_properties(*stale)
                if schemas.ledger_uuid_of(table) != self.uuid:  # a table of a new catalog, with runs of its own
                    transaction.set_properties({schemas.LEDGER_UUID_PROPERTY: self.uuid})
            record_appends(table, *lost)

        retrying()(once)


def _gaps_in(seqs: set[int]) -> list[int]:
    return sorted(set(range(1, max(seqs) + 1)) - seqs)


def _append_of(
    lakehouse: Lakehouse, rows: list[typed_rows.LedgerRow], folder: str, checkpoint_id: str, files: StoreFiles
) -> pa.Table:
    """Return the rows of the append that committed a checkpoint, from its manifest. `rows` are those before it."""
    run, before = rows[-1].run, run_rows.fence_of_rows(rows)
    named = f"/step-{checkpoint_id.removeprefix(f'{run}-')}"
    known = list(run_rows.checkpoint_rows(rows).values())
    for place in (each for each in older_ledger.unnamed_folders(folder, files, known) if each.endswith(named)):
        address = f"{place}/manifest.json"
        content = files.read(address)
        manifest = parse_manifest(content, origin=address)
        repeated = arrow_rows.parse_columns(manifest.ledger_rows)
        if manifest.parent != before.head or max(row.seq for row in repeated) > before.seq:
            raise errors.HeadMoved(
                f"expected it to follow {before.head!r} at seq {before.seq}, found other appends between"
            )
        uri = path_at(address).resolve().as_uri() if is_local(address) else address
        facts: dict[str, Any] = {"manifest_uri": uri, "manifest_digest": content_digest(content)}
        facts |= {"model_digest": manifest.model_digest, "bytes": sum(entry.bytes for entry in manifest.files)}
        own = [row for row in repeated if not row.seq]
        own = [replace(row, **facts) if isinstance(row, typed_rows.CheckpointRow) else row for row in own]
        nonce = checkpoint_id.removeprefix(f"{run}-").split("-")[1]  # a replica group has its name after it
        fence = run_rows.Fence(attempt=manifest.attempt, nonce=nonce, seq=before.seq + 1, head=checkpoint_id)
        return recorded_rows(lakehouse, run, fence, own)
    raise errors.CheckpointDamaged(f"expected the folder of checkpoint {checkpoint_id!r} in {folder!r}, found none")


def _load(lakehouse: Lakehouse, name: str) -> Table | None:
    """Return an own table. None: it is gone or empty, or a file that it names is gone or is no such file."""

    def once() -> Table | None:
        table = lakehouse.load(f"{lakehouse.config.namespace}.{name}")
        read_rows(table, AlwaysTrue(), columns=table.schema().column_names[:1])
        return table if table.metadata.snapshots else None  # a catalog that was made again has empty ones

    lost = (errors.NoSuchTable, errors.MetadataLost, errors.LedgerOlderThanStore, FileNotFoundError, ValueError)
    with reachable(lakehouse.config.uri), suppress(*lost):
        return rereading()(once)
    return None


def _named(lakehouse: Lakehouse) -> Table | None:
    """Return the ledger table as the catalog names it. None: it is gone, or its metadata file."""
    with suppress(errors.NoSuchTable, errors.MetadataLost, errors.LedgerOlderThanStore):
        return lakehouse.load(f"{lakehouse.config.namespace}.{_LEDGER}")
    return None


def _place(lakehouse: Lakehouse, journal: str | None) -> tuple[str, FileIO]:
    """Return the location of a lost ledger table, and its file I/O."""
    if isinstance(lakehouse.catalog, MetastoreCatalog):
        location = lakehouse.catalog._get_default_warehouse_location(lakehouse.config.namespace, _LEDGER)
    elif journal is not None:
        location = journal.rstrip("/").removesuffix("/data/journal")
    else:
        raise errors.BadInput(
            f"expected the table of the ledger in the catalog at {lakehouse.config.address!r}, found none, and only its server "
            "knows where it was: name the folder `data/journal` in the table's location with --journal"
        )
    return location, lakehouse.file_io(location)


def _make_again(catalog: MetastoreCatalog, name: str, location: str, io: FileIO, uuid: str) -> None:
    """Make an empty ledger table, with the uuid of the lost one, in place of a lost or empty one."""
    schema, spec = schemas.TABLES[_LEDGER]
    version = max(map(version_of, metadata_files(io, f"{location}/metadata")), default=-1) + 1
    place = f"{location}/metadata/{version:05}-{uuid4()}.metadata.json"
    metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, location, TABLE_PROPERTIES, UUID(uuid))
    ToOutputFile.table_metadata(metadata, io.new_output(place))
    _register(catalog, name, place)


def _register(catalog: MetastoreCatalog, name: str, place: str) -> None:
    """Let the catalog name a metadata file for a table. The files of another table of that name stay."""
    with suppress(NoSuchTableError):
        catalog.drop_table(name)
    catalog.register_table(name, place)


def _restore(lakehouse: Lakehouse, name: str, location: str, dry_run: bool) -> str:
    """Give a table that is no ledger the rows of its newest metadata file. Return what happened. `location` is for a lost one."""
    catalog, table, io, log = lakehouse.catalog, _load(lakehouse, name), lakehouse.file_io(location), set()
    if table is not None:
        location, io, log = table.location(), table.io, {each.metadata_file for each in table.metadata.metadata_log}
        log.add(table.metadata_location)
    for place in metadata_files(io, f"{location}/metadata"):
        with suppress(FileNotFoundError, ValueError):
            lost = StaticTable.from_metadata(place, io.properties)
            if place in log or not lost.metadata.snapshots:
                continue
            rows = read_rows(lost, AlwaysTrue())
            break
    else:
        return "kept" if table is not None else "empty"
    if table is None and isinstance(catalog, MetastoreCatalog):
        if not dry_run:
            with reachable(lakehouse.config.uri):
                _register(catalog, f"{lakehouse.config.namespace}.{name}", place)
        return f"restored with {len(rows)} rows"
    lacking = rows if table is None else _difference(rows, read_rows(table, AlwaysTrue()))
    if len(lacking) and not dry_run:
        append_own(lakehouse, name, lacking, unless=lambda: not len(_difference(rows, lakehouse.read_own(name))))
    uuid = str(lost.metadata.table_uuid)
    if not dry_run and schemas.ledger_uuid_of(lakehouse.own(name)) != uuid:
        with committing(lakehouse, lakehouse.own(name)) as transaction:
            transaction.set_properties({schemas.LEDGER_UUID_PROPERTY: uuid})
    return f"{len(lacking)} rows added" if len(lacking) else "kept"


def _difference(rows: pa.Table, known: pa.Table) -> pa.Table:
    """Return the rows that are not among the known ones, in the schema of those."""
    import duckdb  # it takes 0.2 s to import

    rows = pa.concat_tables([known.slice(0, 0), rows], promote_options="default").select(known.column_names)
    # a plan that was made again has the same id, and counts once
    other_plans = (
        " WHERE plan_id NOT IN (SELECT plan_id FROM known)" if {"plan_id", "write_id"} <= {*rows.column_names} else ""
    )
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", rows)
        connection.register("known", known)
        found: pa.Table = connection.sql(f"FROM rows{other_plans} EXCEPT FROM known").to_arrow_table()
    return found.cast(known.schema)
