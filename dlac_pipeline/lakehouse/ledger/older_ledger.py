"""Check that the ledger is not older than its checkpoint store and its warehouse: docs/design/0013-older-ledger.md.

A place is read first, and the rows to compare with afterwards, so that concurrent commits raise no alarm.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import ValidationError
from pyiceberg.expressions import And, BooleanExpression
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.snapshots import ancestors_of

from dlac_pipeline.lakehouse.errors import LakehouseError, LedgerOlderThanStore, SpecInvalid, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, equals, reachable
from dlac_pipeline.lakehouse.iceberg.metadata_files import TableFolder, version_of
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_rows
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow, RewindRow, names_of_kinds
from dlac_pipeline.lakehouse.store_files import StoreFiles

_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_LOSSES = (CheckpointRow, RewindRow)
"""Kinds of rows whose loss changes what a run trains from. Lost claims cost nothing but a number."""
_COLUMNS = ("run", "seq", "kind", "nonce", "checkpoint_id", "step", "manifest_uri")
_COLUMNS_OF_RUN = ("seq", "kind", "attempt", "checkpoint_id", "step", "manifest_uri", "detail")
Key = tuple[str, str, str, int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Newer:
    """Evidence of a committed checkpoint, or rewind, that the ledger lacks."""

    run: str
    step: int
    """Of the newest one that was found, or of the child that names it."""
    place: str
    """Address of the file or folder that proves it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof(Newer):
    """A file in the store that proves a checkpoint to be committed."""

    ledger_uuid: str
    checkpoint_id: str


class LedgerWatch:
    """Looks at the ledger again and again, in a thread, until it is older than before or `close` is called."""

    def __init__(self, lakehouse: Lakehouse, *, every_s: float = 3.0) -> None:
        self._lakehouse = lakehouse
        self._every_s = every_s
        self._closed = threading.Event()
        self._found: LedgerOlderThanStore | None = None
        threading.Thread(target=self._look, name="ledger-watch", daemon=True).start()

    def check(self) -> None:
        """Raise `LedgerOlderThanStore` if the catalog was replaced by an older backup."""
        if self._found is not None:
            raise self._found

    def close(self) -> None:
        """End the looks."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._lakehouse.own("consumption")
            except LedgerOlderThanStore as err:
                self._found = err
                _log.error("%s", err)
                return
            # of a driver or a file system: the next look, or the next commit, may find the catalog again
            except Exception as err:
                _log.debug("the ledger was not looked at: %r", err)


def commit_mark(*, ledger_uuid: str, run: str, checkpoint_id: str, step: int) -> bytes:
    """Return the content of a commit mark."""
    origin = {"format_version": FORMAT_VERSION, "ledger_uuid": ledger_uuid, "run": run}
    return json.dumps({**origin, "checkpoint_id": checkpoint_id, "step": step}).encode()


def check_ledger(lakehouse: Lakehouse, run: str) -> None:
    """Raise `LedgerOlderThanStore` if the warehouse, or a store of the run that can be read, is newer than the ledger."""
    ledger = Ledger(lakehouse)
    rows = _rows_of(ledger, run)
    check_warehouse(lakehouse, run, exists=bool(rows))
    found = [row.manifest_uri.rsplit("/", 3)[0] for row in checkpoint_rows(rows).values()][-1:]
    claimed = [row.store for row in rows if isinstance(row, ClaimRow)][-1:]
    for folder in dict.fromkeys(each for each in (*found, *claimed) if each):
        try:
            newer = newer_in_store(ledger, run, folder, _store_files(lakehouse), rows=rows)
        except (StoreUnavailable, SpecInvalid) as err:
            _log.warning(
                "expected to compare the ledger with the store %s, found %s: the comparison was left out", folder, err
            )
            continue
        _refuse(lakehouse, newer, rows)


def check_store(ledger: Ledger, run: str, folder: str, files: StoreFiles) -> None:
    """Raise `LedgerOlderThanStore` if the run's folder has a checkpoint that the ledger lacks, or `StoreUnavailable`."""
    rows = _rows_of(ledger, run)
    check_warehouse(ledger.lakehouse, run, exists=bool(rows))
    _refuse(ledger.lakehouse, newer_in_store(ledger, run, folder, files, rows=rows), rows)


def _store_files(lakehouse: Lakehouse) -> StoreFiles:
    """Return a store's files with the credentials of the lakehouse, each asked once: for commands that know no job spec."""
    return StoreFiles(lakehouse.config.properties, deadline_s=0.0)


def _rows_of(ledger: Ledger, run: str) -> list[LedgerRow]:
    return ledger.rows(run, kinds=(ClaimRow, CheckpointRow), columns=_COLUMNS_OF_RUN)


def newer_in_store(
    ledger: Ledger, run: str, folder: str, files: StoreFiles, *, rows: Sequence[LedgerRow]
) -> Newer | None:
    """Return a committed checkpoint in the run's folder that the ledger lacks, or None.

    Folders are listed from the newest committed attempt on, because a lost checkpoint was committed after all known ones.
    Only marks and folders that no row names are read. In an intact ledger these are the left-overs of the last attempts.
    """
    uuid, rows_by_id = ledger.table_uuid, checkpoint_rows(rows)
    mark = commit_marked(folder, uuid, files)
    proofs = [] if mark is None or mark.run != run else [mark]
    strangers: set[str] = set()
    for address in _unnamed_folders(folder, files, list(rows_by_id.values())):
        nonce = address.rpartition("-")[2]
        proof = None if nonce in strangers else proven_parent(address, files)
        if proof is not None and (proof.ledger_uuid, proof.run) != (uuid, run):
            strangers.add(nonce)  # of a run of this name in another lakehouse, or of another run
        elif proof is not None and proof.checkpoint_id not in rows_by_id:
            proofs.append(proof)
            break
    suspects = [proof for proof in proofs if proof.checkpoint_id not in rows_by_id]
    if not suspects:
        return None
    known = checkpoint_rows(_rows_of(ledger, run))  # one may have been committed since
    lost = [each for each in suspects if each.ledger_uuid == uuid and each.checkpoint_id not in known]
    return max(lost, key=lambda each: each.step, default=None)


def mark_in(folder: str, ledger_uuid: str) -> str:
    """Return the address of the commit mark in a run's folder: a file that names the newest checkpoint of this ledger."""
    return f"{folder}/committed-{ledger_uuid}.json"


def commit_marked(folder: str, ledger_uuid: str, files: StoreFiles) -> Proof | None:
    """Return the checkpoint whose commit the mark in a run's folder proves, or None without a mark."""
    place = mark_in(folder, ledger_uuid)
    found = _json(place, files)
    return _proof_of(found, place) if found.get("checkpoint_id") else None


def proven_parent(folder: str, files: StoreFiles) -> Proof | None:
    """Return the checkpoint that the manifest in a checkpoint's folder proves to be committed: its parent, if it has one."""
    found = _json(f"{folder}/{_MANIFEST}", files)
    return _proof_of({**found, "checkpoint_id": found["parent"]}, folder) if found.get("parent") else None


def check_warehouse(lakehouse: Lakehouse, run: str | None = None, *, exists: bool = True) -> None:
    """Raise `LedgerOlderThanStore` if a metadata file in the warehouse has commits that the ledger lacks.

    With `run`, only its commits count. If the run `exists`, only newer files are read, otherwise all that the catalog does
    not name.
    """
    table = lakehouse.own("consumption")
    try:
        folder = TableFolder(table)
        unnamed = folder.unnamed_metadata(table)
    except (LakehouseError, OSError):  # a catalog's server may forbid listing its warehouse
        return
    current = version_of(table.metadata_location)
    wanted = unnamed if run is None or not exists else [path for path in unnamed if version_of(path) > current]
    rows = _KnownRows(lakehouse, run)
    for path in wanted:
        with reachable(lakehouse.config.uri):
            newer = _newer_state(rows, table, folder, path)
        if newer is not None:
            _refuse(lakehouse, newer, Ledger(lakehouse).rows(newer.run, kinds=(CheckpointRow,)))


class _KnownRows:
    """The rows of the kinds that count which the ledger has, of a run or of all: read once, and again if one seems lost."""

    def __init__(self, lakehouse: Lakehouse, run: str | None) -> None:
        kinds = among("kind", names_of_kinds(_LOSSES))
        self.lakehouse = lakehouse
        self.run = run
        self._wanted: BooleanExpression = kinds if run is None else And(kinds, equals("run", run))
        self._known: set[Key] = set()
        self._whole: set[int] = set()
        """Snapshots of which the ledger has every row: many failed commits are built on one snapshot."""

    def missing_rows(self, state: Table, snapshot_id: int | None) -> list[CheckpointRow | RewindRow]:
        if snapshot_id is None or snapshot_id in self._whole or state.snapshot_by_id(snapshot_id) is None:
            return []
        scan = state.scan(row_filter=self._wanted, selected_fields=_COLUMNS, snapshot_id=snapshot_id)
        found = [row for row in parse_rows(scan.to_arrow()) if isinstance(row, CheckpointRow | RewindRow)]
        if any(_key(row) not in self._known for row in found):  # it may have been committed since
            rows = parse_rows(self.lakehouse.read_own("consumption", self._wanted, columns=_COLUMNS))
            self._known = {_key(row) for row in rows if isinstance(row, CheckpointRow | RewindRow)}
        lost = [row for row in found if _key(row) not in self._known]
        if not lost:
            self._whole.add(snapshot_id)
        return lost


def _newer_state(rows: _KnownRows, table: Table, folder: TableFolder, path: str) -> Newer | None:
    """Return what an unnamed metadata file proves that the ledger lacks. `table` is the ledger as it was before."""
    content, location = folder.metadata(path), folder.location_of(path)
    mine = content.get("table-uuid") == str(table.metadata.table_uuid)
    if not content or not (mine or rows.run is not None):
        return None
    try:
        metadata = TableMetadataUtil.parse_obj(content)
    except (ValidationError, ValueError, KeyError, TypeError, AttributeError):
        return None
    name, catalog = ("static-table", location), NoopCatalog("static-table")
    state = StaticTable(name, metadata, metadata_location=location, io=table.io, catalog=catalog)
    try:
        current = state.current_snapshot()  # the one under it was committed
        parent = None if current is None else state.snapshot_by_id(current.parent_snapshot_id or 0)
        history = (each.snapshot_id for each in ancestors_of(table.current_snapshot(), table.metadata))
        if parent is not None and not (mine and parent.snapshot_id in history):
            lost = rows.missing_rows(state, parent.snapshot_id)
            if lost:
                newest = max(lost, key=lambda row: (isinstance(row, CheckpointRow), row.step))
                return Newer(run=newest.run, step=newest.step, place=location)
        if version_of(path) > version_of(table.metadata_location):
            lost = rows.missing_rows(state, state.metadata.current_snapshot_id)
            return _lost_checkpoint(rows.lakehouse, lost, str(state.metadata.table_uuid), location)
    except FileNotFoundError:  # upkeep, or the next commit, removed it
        return None
    return None


def _lost_checkpoint(lakehouse: Lakehouse, lost: Sequence[LedgerRow], ledger_uuid: str, location: str) -> Newer | None:
    """Return the one of these rows' checkpoints that the mark in its store names."""
    files = _store_files(lakehouse)
    checkpoints = [row for row in lost if isinstance(row, CheckpointRow) and row.manifest_uri]
    for row in Ledger(lakehouse).translate(checkpoints):
        try:
            mark = commit_marked(row.manifest_uri.rsplit("/", 3)[0], ledger_uuid, files)
        except (StoreUnavailable, SpecInvalid):  # a store that is unavailable proves nothing
            continue
        if mark is None or mark.checkpoint_id != row.checkpoint_id:
            continue
        now = Ledger(lakehouse).rows(row.run, kinds=(CheckpointRow,))  # it may have been committed since
        if mark.checkpoint_id not in checkpoint_rows(now):
            return Newer(run=row.run, step=row.step, place=location)
    return None


def _refuse(lakehouse: Lakehouse, newer: Newer | None, rows: list[LedgerRow]) -> None:
    """Raise `LedgerOlderThanStore` if there is something newer than these rows of its run."""
    if newer is None:
        return
    known = [row.step for row in checkpoint_rows(rows).values()]
    raise LedgerOlderThanStore(
        f"expected the newest ledger of run {newer.run!r}, found one whose newest step is {max(known, default=0)}, while step "
        f"{newer.step} was committed as {newer.place!r} shows: the catalog at {lakehouse.config.address!r} was restored from "
        f"an older backup; nothing was deleted: stop all launches and restore the newest backup of the catalog"
        f"{_newest_of(lakehouse)}"
    )


def _newest_of(lakehouse: Lakehouse) -> str:
    """Return what else may be restored: the newest metadata file of the ledger, if the catalog names an older one."""
    table = lakehouse.own("consumption")
    try:
        folder = TableFolder(table)
        newest = next(iter(folder.metadata_paths()), "")
    except (LakehouseError, OSError):
        return ""
    if version_of(newest) <= version_of(table.metadata_location):
        return ""
    return (
        f", or point the catalog's metadata_location of table {'.'.join(table.name())!r} to "
        f"{folder.location_of(newest)!r} (docs/recovery.md)"
    )


def _unnamed_folders(folder: str, files: StoreFiles, committed: Sequence[CheckpointRow]) -> list[str]:
    """Return folders of no known checkpoint, of the last attempt that committed and later ones, the newest first."""
    named = {"/".join(row.manifest_uri.split("/")[-3:-1]) for row in committed}
    last = max((row.attempt for row in committed), default=0)
    attempts = [each for each in files.children(folder) if _attempt_of(each) >= last]
    found = [f"{each}/{step}" for each in attempts for step in files.children(f"{folder}/{each}")]
    return [f"{folder}/{name}" for name in sorted(found, reverse=True) if name not in named and "/step-" in name]


def _attempt_of(name: str) -> int:
    number = name.removeprefix("attempt-")
    return int(number) if number != name and number.isdecimal() else -1


def _proof_of(mark: Mapping[str, Any], place: str) -> Proof:
    found, uuid, run = mark.get("step"), str(mark.get("ledger_uuid", "")), str(mark.get("run", ""))
    step = found if isinstance(found, int) else 0  # the mark proves its checkpoint without a step
    return Proof(ledger_uuid=uuid, run=run, checkpoint_id=str(mark["checkpoint_id"]), step=step, place=place)


def _key(row: CheckpointRow | RewindRow) -> Key:
    return row.run, row.kind, row.checkpoint_id or "", row.seq, row.nonce


def _json(address: str, files: StoreFiles) -> dict[str, Any]:
    """Return a JSON object. Empty if it is gone or cut short."""
    try:
        found = json.loads(files.read(address))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
