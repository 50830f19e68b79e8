"""Rebuild of DLAC's tables after a loss: the ledger from its journal, all further tables from their newest metadata files.

In: a lakehouse that `connect_damaged` opened. Out: a `Rebuilt`. No file is deleted or renamed. See docs/design/0024-journal.md.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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

from dlac_pipeline.extensions.rebuild.appends import stored_appends
from dlac_pipeline.extensions.rebuild.tables import (
    check_whole,
    intact_rows,
    missing_slices,
    parsed_tables,
    recorded_count,
    rows_in_folder,
)
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, properties_of, reachable
from dlac_pipeline.lakehouse.iceberg.metadata_files import metadata_files, version_of
from dlac_pipeline.lakehouse.iceberg.own_rows import read_rows
from dlac_pipeline.lakehouse.ledger import arrow_rows, older_ledger, run_rows, schemas, typed_rows
from dlac_pipeline.lakehouse.ledger.journal import Entry, Journal, journal_address, record_appends, seqs_by_run
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, fence_property
from dlac_pipeline.lakehouse.ledger.plans import append_own
from dlac_pipeline.lakehouse.maintenance.expiry import committing
from dlac_pipeline.lakehouse.retrying import rereading, retrying
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.spec.bounds import LOST_AFTER_S
from dlac_pipeline.supervise.liveness.launch_liveness import liveness_of

_LEDGER = "consumption"
_LOST = (errors.NoSuchTable, errors.MetadataLost, errors.LedgerOlderThanStore, errors.TableDamaged)
_HEAD_NAMES = [each.kind for each in typed_rows.HEAD_KINDS]
_NAMED = 5
"""Appends that a message names, at the most."""
_SAMPLED = 9
"""Entries of a run by which the identity of its ledger is known."""
_THREADS = 8


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
    problems: dict[str, str]
    """Table -> the rows that it lacks after the rebuild, with the thing to do."""

    @property
    def complete(self) -> bool:
        """True if nothing is missing."""
        return not (self.problems or any(each.problem for each in self.runs))


def rebuild_ledger(
    lakehouse: Lakehouse, *, journal: str | None = None, dry_run: bool = False, files: StoreFiles | None = None
) -> Rebuilt:
    """Append the rows that the journal has and the ledger lacks in one commit, and restore lost tables. A repeat changes nothing.

    `journal` is the address of a journal in another place. `files` has the credentials of the checkpoint store.

    Raises:
        BadInput: no entry is at the address of the journal. Nothing was changed.
        RunBusy: a launch of a run that lacks appends is alive.
        LedgerError: a damaged ledger has rows that nothing else has.
    """
    catalog, named, table = lakehouse.catalog, _named(lakehouse, _LEDGER), _load(lakehouse, _LEDGER)
    location, io = _place(lakehouse, journal) if named is None else (named.location(), named.io)
    default = f"{location}/data/journal" if named is None else journal_address(named)
    loss = _Loss(lakehouse, table, Journal(io, journal or default))
    if table is None and named is not None:
        loss.add_rows(intact_rows(named))
    loss.check_idle()
    loss.search_store(files or older_ledger.lakehouse_store(lakehouse))
    if table is None and named is not None:
        loss.check_rows(recorded_count(named))
    folder = location.rpartition("/")[0]
    restored = {
        each: _restore(lakehouse, each, f"{folder}/{each}", dry_run) for each in schemas.TABLES if each != _LEDGER
    }
    tables = {each: done for each, (done, _) in restored.items()}
    problems = {each: lost for each, (_, lost) in restored.items() if lost}
    tables[_LEDGER] = "kept" if table is not None else "made again"
    if not dry_run:
        # a server makes the table itself, and may delete the files of one that is dropped
        if isinstance(catalog, MetastoreCatalog) and (named is None or not named.metadata.snapshots):
            with reachable(lakehouse.config.uri):
                _make_again(lakehouse, _LEDGER, location, io, loss.uuid)
        loss.append()
        problems.pop("slices", None)
        tables["slices"] += _compute_slices(lakehouse, problems)
    return Rebuilt(tables=tables, runs=loss.runs(), problems=problems)


class _Loss:
    """Appends that the ledger lacks, and the rows that the journal or the store has of them.

    Without a `table` it lacks all. An entry counts for the append that its rows name, whatever its file is called.
    """

    def __init__(self, lakehouse: Lakehouse, table: Table | None, journal: Journal) -> None:
        self._lakehouse = lakehouse
        self._journal = journal
        with reachable(lakehouse.config.uri):
            self._entries, self._last = journal.entries(), journal.last_seqs()
        if not self._entries:
            raise errors.BadInput(
                f"expected entries RUN/SEQ.parquet of the ledger's journal in {journal.address!r}, found none; nothing was "
                "changed: name the lakehouse with --home or --spec, or the address of the journal with --journal"
            )
        keys = heads = arrow_rows.CONSUMPTION_ARROW.empty_table()
        if table is not None:
            keys, heads = (
                read_rows(table, AlwaysTrue(), columns=("run", "seq")),
                read_rows(table, among("kind", _HEAD_NAMES)),
            )
        self._known = defaultdict(set, seqs_by_run(keys))
        self._known_heads = heads
        self._names = sorted({*self._known, *self._entries, *self._last})
        self._found: dict[str, dict[int, pa.Table]] = defaultdict(dict)
        """Run -> `seq` -> rows of an append that the ledger lacks."""
        self._damaged: dict[str, dict[int, str]] = defaultdict(dict)
        """Run -> number of an entry without the rows of its append -> the problem."""
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._left_out: set[str] = set()
        # of a new catalog in the place of a lost one, the identity is the older one
        self.uuid = self._read_entries("" if table is None else table.properties.get(schemas.LEDGER_UUID_PROPERTY, ""))

    def _read_entries(self, uuid: str) -> str:
        """Read the entries of missing appends. Return the identity of the ledger: `uuid`, or the longest run's."""
        longest = max(self._names, key=lambda run: len(self._entries.get(run, {})))
        uuids = {run: self._uuid_of_most(run) for run in self._names}
        uuid = uuid or uuids[longest]
        for run in self._names:
            wanted = sorted(self._entries.get(run, {}).keys() - self._known[run])
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="entries") as pool:
                for seq, found in zip(wanted, pool.map(partial(self._entry, run), wanted), strict=True):
                    if isinstance(found, Entry) and found.ledger_uuid in (uuid, uuids[run]) and found.is_of(run, seq):
                        self._found[run][seq] = found.rows
                    else:
                        self._damaged[run][seq] = _describe(found)
                        if isinstance(found, Entry):  # a copy of something else proves no append
                            self._entries[run].pop(seq)
        return uuid

    def _entry(self, run: str, seq: int) -> "Entry | errors.LedgerError":
        try:
            return self._journal.read_entry(self._entries[run][seq])
        except errors.FormatTooNew:
            raise
        except errors.LedgerError as err:
            return err

    def _uuid_of_most(self, run: str) -> str:
        counts: Counter[str] = Counter()
        for seq in sorted(self._entries.get(run, {}), reverse=True)[:_SAMPLED]:
            with suppress(errors.LedgerError):
                counts[self._journal.ledger_uuid(self._entries[run][seq])] += 1
        return max(counts, key=lambda each: counts[each], default="")

    def add_rows(self, rows: pa.Table) -> None:
        """Take the intact rows of a damaged ledger for appends that the journal lacks."""
        for run, seqs in seqs_by_run(rows).items():
            own = rows.filter(pc.equal(rows["run"], run))
            for seq in seqs - self._found[run].keys():
                self._found[run][seq] = own.filter(pc.equal(own["seq"], seq))
            self._names = sorted({*self._names, run})

    def check_idle(self) -> None:
        """Raise `RunBusy` if a launch of a run that lacks appends is alive."""
        for run in (each for each in self._names if self._lacks(each)):
            rows = self._rows_of(run)
            attempt = run_rows.fence_of_rows(rows).attempt
            launch = liveness_of(rows, attempt)
            if not run_rows.finished_of_rows(rows) and launch.alive(lost_after_s=LOST_AFTER_S):
                raise errors.RunBusy(
                    f"expected no launch of run {run!r} during a rebuild of the ledger, found that attempt {attempt} on node "
                    f"{launch.host!r} is alive; nothing was changed: stop it, or wait for {LOST_AFTER_S:.0f} s if it is gone"
                )

    def _lacks(self, run: str) -> bool:
        return bool(self._found[run] or self._gaps(run))

    def _rows_of(self, run: str) -> list[typed_rows.LedgerRow]:
        """Return the rows of a run that define its state, from the ledger and from the found entries."""
        found = [rows for _, rows in sorted(self._found[run].items())]
        known = self._known_heads.filter(pc.equal(self._known_heads["run"], run))
        rows = pa.concat_tables([known, *found], promote_options="default")
        heads = rows.filter(pc.is_in(rows["kind"], pa.array(_HEAD_NAMES)))
        return Ledger(self._lakehouse).translate(arrow_rows.parse_rows(heads))

    def _gaps(self, run: str) -> list[int]:
        """Return the numbers of appends that something proves, and whose rows are not found."""
        found = self._known[run] | self._found[run].keys()
        newest = max(found, default=0)
        last = min(self._last.get(run, 0), newest + _SAMPLED)  # the file may have any number
        unread = self._damaged[run].keys() & self._entries.get(run, {}).keys()
        return sorted(({*range(1, max(newest, last) + 1)} | unread) - found)

    def search_store(self, files: StoreFiles) -> None:
        """Add the appends that only the store has. Decide which ones are left out, and note losses."""
        for run in self._names:
            rows = self._rows_of(run)
            try:
                newer = [
                    proof
                    for folder in older_ledger.folders_of(rows)
                    for proof in older_ledger.lost_in_store(self.uuid, run, folder, files, rows=rows)
                ]
                if newer or self._gaps(run):
                    self._found[run] |= stored_appends(self._lakehouse, run, rows, self.uuid, files)
                known = run_rows.checkpoint_rows(self._rows_of(run))
                if lost := [each for each in newer if each.checkpoint_id not in known]:
                    self._problems[run].append(
                        f"the journal lacks the committed checkpoint {lost[0].checkpoint_id!r} of the store, and no manifest "
                        f"restores it: restore the newest files of {self._journal.address}/{run} from a backup"
                    )
            except (errors.StoreUnavailable, errors.SpecInvalid) as err:
                self._problems[run].append(f"the checkpoint store was not compared: {err}")
            self._judge(run)

    def _judge(self, run: str) -> None:
        """Note the lost appends of a run. Leave the run out if it could not be resumed without them."""
        gaps = self._gaps(run)
        if not gaps:
            return
        rows, known = (
            self._rows_of(run),
            "; ".join(f"{seq}: {self._damaged[run][seq]}" for seq in gaps[:_NAMED] if seq in self._damaged[run]),
        )
        head = run_rows.fence_of_rows(rows).head
        checkpoint = run_rows.checkpoint_rows(rows).get(head or "")
        legs = {row.leg for row in rows if isinstance(row, typed_rows.LegRow)}
        out = head is not None and (checkpoint is None or checkpoint.leg not in legs)
        if out:
            self._left_out.add(run)
        self._problems[run].insert(
            0,
            f"expected every append of the run in the journal, found none with seq {gaps[:_NAMED]!r}"
            f"{f' (entry {known})' if known else ''}: restore those files in {self._journal.address}/{run}, or a newer backup of "
            "the catalog, and repeat the command"
            + ("" if out else "; move files away that are no entries; its audit names the lost appends until then"),
        )

    def check_rows(self, recorded: int) -> None:
        """Raise `LedgerError` if fewer rows were found than a table that cannot be read had. Nothing may replace it then."""
        found = sum(len(rows) for appends in self._found.values() for rows in appends.values())
        if found < recorded:
            lost = {run: self._gaps(run)[:_NAMED] for run in self._names if self._gaps(run)}
            raise errors.LedgerError(
                f"expected the {recorded} rows of the damaged ledger in the journal {self._journal.address!r}, found {found}, "
                f"without the appends {lost!r} (run: seq); nothing was changed: restore the lost file of the table, or the "
                "missing entries, from a backup"
            )

    def append(self) -> None:
        """Append the missing rows in one commit. Fences are read from the rows after that."""
        runs = [run for run in self._names if run not in self._left_out]
        stored: list[pa.Table] = []

        def lacking(whole: Table | None) -> pa.Table:
            keys = None if whole is None else read_rows(whole, AlwaysTrue(), columns=("run", "seq"))
            known = defaultdict(set, {} if keys is None else seqs_by_run(keys))
            appends = [
                (seq, run, rows)
                for run in runs
                for seq, rows in sorted(self._found[run].items())
                if seq not in known[run]
            ]
            stored[:] = [rows for seq, run, rows in appends if seq not in self._entries.get(run, {})]
            empty = arrow_rows.CONSUMPTION_ARROW.empty_table()
            return pa.concat_tables([empty, *(rows for *_, rows in appends)], promote_options="default").cast(
                empty.schema
            )

        stale = [fence_property(run) for run in runs]
        if _append_lacking(self._lakehouse, _LEDGER, lacking, self.uuid, stale=stale):
            record_appends(self._lakehouse.own(_LEDGER), *(each.cast(arrow_rows.CONSUMPTION_ARROW) for each in stored))

    def runs(self) -> list[RebuiltRun]:
        """Return the result for each run."""
        done = []
        for run in self._names:
            missing = 0 if run in self._left_out else len(self._found[run].keys() - self._known[run])
            appends = len(self._known[run]) + missing
            problem = "; ".join(self._problems[run])
            done.append(RebuiltRun(run=run, appends=appends, missing=missing, problem=problem))
        return done


def _describe(found: "Entry | errors.LedgerError") -> str:
    if isinstance(found, Entry):
        return f"rows {dict(sorted(found.seqs.items()))!r} of ledger {found.ledger_uuid or 'unknown'}"
    return str(found)


def _append_lacking(
    lakehouse: Lakehouse,
    name: str,
    lacking: Callable[[Table | None], pa.Table],
    uuid: str,
    *,
    stale: Iterable[str] = (),
) -> bool:
    """Append the rows that `lacking` returns for the table, or for None if it is damaged, in one commit. False: none were due.

    The commit replaces the snapshots of a damaged table, removes the properties `stale`, and records the identity `uuid`.
    """

    def once() -> bool:
        table, whole = lakehouse.own(name), _load(lakehouse, name)
        rows = lacking(whole)
        if not len(rows) and schemas.ledger_uuid_of(table) == uuid:
            return False
        damaged = [each.snapshot_id for each in table.metadata.snapshots] if whole is None else []
        with committing(lakehouse, table) as transaction:
            if damaged:  # the next snapshot has no parent, whose manifests may be lost
                ManageSnapshots(transaction).remove_branch(MAIN_BRANCH).commit()
            if len(rows):
                transaction.append(rows)
            if damaged:
                ExpireSnapshots(transaction).by_ids(damaged).commit()
            transaction.remove_properties(*({*stale} & table.properties.keys()))
            if schemas.ledger_uuid_of(table) != uuid:  # a table of a new catalog, with rows of its own
                transaction.set_properties({schemas.LEDGER_UUID_PROPERTY: uuid})
        lakehouse.forget(name)
        return True

    return retrying()(once)


def _load(lakehouse: Lakehouse, name: str) -> Table | None:
    """Return an own table. None: it is gone or empty, or a file that it names is gone, cut or replaced."""

    def once() -> Table | None:
        table = lakehouse.load(f"{lakehouse.config.namespace}.{name}")
        check_whole(table)
        return table if table.metadata.snapshots else None  # a catalog that was made again has empty ones

    with reachable(lakehouse.config.uri), suppress(*_LOST, FileNotFoundError):
        return rereading()(once)
    return None


def _named(lakehouse: Lakehouse, name: str) -> Table | None:
    """Return an own table as the catalog names it. None: it is gone, or its metadata file."""
    with suppress(*_LOST):
        return lakehouse.load(f"{lakehouse.config.namespace}.{name}")
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


def _make_again(lakehouse: Lakehouse, name: str, location: str, io: FileIO, uuid: str) -> None:
    """Make an empty own table, with the uuid of the lost one, in place of a lost or empty one."""
    schema, spec = schemas.TABLES[name]
    version = max(map(version_of, metadata_files(io, f"{location}/metadata")), default=-1) + 1
    place = f"{location}/metadata/{version:05}-{uuid4()}.metadata.json"
    metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, location, properties_of(name), UUID(uuid))
    ToOutputFile.table_metadata(metadata, io.new_output(place))
    _register(lakehouse, name, place)


def _register(lakehouse: Lakehouse, name: str, place: str) -> None:
    """Let the catalog name a metadata file for an own table. The files of another table of that name stay."""
    identifier = f"{lakehouse.config.namespace}.{name}"
    with suppress(NoSuchTableError):
        lakehouse.catalog.drop_table(identifier)
    lakehouse.catalog.register_table(identifier, place)


def _restore(lakehouse: Lakehouse, name: str, location: str, dry_run: bool) -> tuple[str, str]:
    """Give a table that is no ledger the rows that its files have. Return the outcome, and the losses.

    Its rows are of plans and recoveries, and have ids of their content, so rows of a commit that failed do no harm. `location` is
    for a table that the catalog lacks.
    """
    table, named = _load(lakehouse, name), _named(lakehouse, name)
    location, io = (location, lakehouse.file_io(location)) if named is None else (named.location(), named.io)
    place, lost = next(parsed_tables(io, location), ("", None))
    if table is not None:
        return _add_newer(lakehouse, name, table, dry_run), ""
    rows = _distinct(rows_in_folder(name, location, io))
    if lost is None and not len(rows):
        return "empty", ""
    uuid = str(uuid4()) if lost is None else str(lost.metadata.table_uuid)
    recorded = max(recorded_count(each) for each in (lost, named) if each is not None) if lost or named else 0
    if not dry_run:
        with reachable(lakehouse.config.uri):
            _replace(lakehouse, name, (place, lost), rows, (location, io, uuid))
    if len(rows) >= recorded:
        return f"restored with {len(rows)} rows", ""
    lacks = f"restored with {len(rows)} of {recorded} rows"
    return lacks, (
        f"expected the {recorded} rows of table {name!r} in the data files of {location!r}, found {len(rows)}: restore those "
        "files from a backup, and repeat the command"
    )


def _replace(
    lakehouse: Lakehouse,
    name: str,
    newest: tuple[str, StaticTable | None],
    rows: pa.Table,
    made: tuple[str, FileIO, str],
) -> None:
    """Replace a lost table: by its newest metadata file if that has all rows, or else by one with the rows."""
    place, lost = newest
    location, io, uuid = made
    if isinstance(lakehouse.catalog, MetastoreCatalog):
        with suppress(errors.TableDamaged, FileNotFoundError):
            if lost is not None:
                check_whole(lost)
                if not len(_difference(rows, read_rows(lost, AlwaysTrue()))):
                    _register(lakehouse, name, place)
                    return
        _make_again(lakehouse, name, location, io, uuid)
    _append_lacking(lakehouse, name, partial(_lacking, rows), uuid)


def _add_newer(lakehouse: Lakehouse, name: str, table: Table, dry_run: bool) -> str:
    """Append the rows of metadata files that are not in the table's past, and that it lacks.

    They are newer than an older catalog, or are of a table whose catalog was lost. Their versions may be lower.
    """
    own, uuid = str(table.metadata.table_uuid), schemas.ledger_uuid_of(table)
    past, parts = _places(table), list[pa.Table]()
    for place, other in parsed_tables(table.io, table.location()):
        if place in past:
            continue
        with suppress(errors.TableDamaged, FileNotFoundError):
            check_whole(other)
            parts.append(read_rows(other, AlwaysTrue()))
            past |= _places(other)
            uuid = schemas.ledger_uuid_of(other) if uuid == own else uuid
    if not parts:
        return "kept"
    rows = _distinct(pa.concat_tables(parts, promote_options="default"))
    lacking = _lacking(rows, table)
    if not dry_run:
        _append_lacking(lakehouse, name, partial(_lacking, rows), uuid)
    return f"{len(lacking)} rows added" if len(lacking) else "kept"


def _places(table: Table) -> set[str]:
    """Return the addresses of a table's metadata file, and of those that it has replaced."""
    return {table.metadata_location, *(each.metadata_file for each in table.metadata.metadata_log)}


def _compute_slices(lakehouse: Lakehouse, problems: dict[str, str]) -> str:
    """Append the slices that the ledger names and the table lacks. Return the outcome, and note losses in `problems`."""
    known = lakehouse.read_own("slices")
    rows, lost = missing_slices(lakehouse, known=known)
    lacking = _difference(rows, known)
    if len(lacking):
        append_own(
            lakehouse, "slices", lacking, unless=lambda: not len(_difference(rows, lakehouse.read_own("slices")))
        )
    if lost:
        problems["slices"] = (
            f"expected the slices of every cut that the ledger names, found none of {lost[:_NAMED]!r}, and a plan or leg that "
            "computes them is lost: restore the tables `plans` and `work_units` from a backup, and repeat the command"
        )
    return f", {len(lacking)} rows computed again" if len(lacking) else ""


def _lacking(rows: pa.Table, whole: Table | None) -> pa.Table:
    return rows if whole is None else _difference(rows, read_rows(whole, AlwaysTrue()))


def _distinct(rows: pa.Table) -> pa.Table:
    return _difference(rows, rows.slice(0, 0))


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
