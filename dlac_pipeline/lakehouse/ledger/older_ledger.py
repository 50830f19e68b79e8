"""Check that the ledger is not older than its journal and its checkpoint store: docs/design/0024-journal.md.

A place is read first, and the rows to compare with afterwards, so that concurrent commits raise no alarm.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlac_pipeline.lakehouse.errors import (
    HOW_TO_RENEW,
    CatalogUnreachable,
    LakehouseError,
    LedgerError,
    LedgerOlderThanStore,
    SpecInvalid,
    StoreUnavailable,
)
from dlac_pipeline.lakehouse.iceberg.connect import LOOKS_AT_OLDER_S, Lakehouse, reachable
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_rows
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, fill_journal
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.lakehouse.store_files import StoreFiles

_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_FILLED_BY_CLAIM = 100
"""Entries that a claim writes at the most. More are left to upkeep, because each takes milliseconds."""
_COLUMNS_OF_RUN = ("seq", "kind", "attempt", "checkpoint_id", "step", "manifest_uri", "claim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Evidence of a committed append that the ledger lacks: an entry of the journal, or a file in the store."""

    run: str
    step: int | None
    """Step of the newest checkpoint that was found, or of the child that names it. None: there is none, or it cannot be read."""
    place: str
    """Address of the file or folder that proves it."""
    ledger_uuid: str = ""
    checkpoint_id: str = ""
    """The checkpoint that a file in the store proves, and its ledger."""


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


def check_ledger(lakehouse: Lakehouse, run: str, *, rows: Sequence[LedgerRow] | None = None) -> None:
    """Raise `LedgerOlderThanStore` if the journal, or a store of the run that can be read, is newer than the ledger.

    `rows` are those of the run, if they have been read.
    """
    check_journal(lakehouse, run)
    ledger = Ledger(lakehouse)
    rows = _rows_of(ledger, run) if rows is None else rows
    for folder in folders_of(rows):
        try:
            newer = newer_in_store(ledger, run, folder, lakehouse_store(lakehouse), rows=rows)
        except (StoreUnavailable, SpecInvalid) as err:
            _log.warning(
                "expected to compare the ledger with the store %s, found %s: the comparison was left out", folder, err
            )
            continue
        _refuse(lakehouse, newer, rows)


def check_store(ledger: Ledger, run: str, folder: str, files: StoreFiles) -> None:
    """Raise `LedgerOlderThanStore` if the journal or the run's folder has rows that the ledger lacks, or `StoreUnavailable`.

    A few entries that the journal lacks are written.
    """
    check_journal(ledger.lakehouse, run, fill=_FILLED_BY_CLAIM)
    # All columns, because a claim reads these rows of the same snapshot again.
    rows = ledger.rows(run, kinds=HEAD_KINDS)
    _refuse(ledger.lakehouse, newer_in_store(ledger, run, folder, files, rows=rows), rows)


def lakehouse_store(lakehouse: Lakehouse) -> StoreFiles:
    """Return a store's files with the credentials of the lakehouse, each asked once: for commands that know no job spec."""
    return StoreFiles(lakehouse.config.properties, deadline_s=0.0)


def folders_of(rows: Sequence[LedgerRow]) -> list[str]:
    """Return the addresses of a run's folder in the store: of its newest checkpoint, and of its last claim."""
    found = [row.manifest_uri.rsplit("/", 3)[0] for row in checkpoint_rows(rows).values()][-1:]
    claimed = [row.store for row in rows if isinstance(row, ClaimRow)][-1:]
    return list(dict.fromkeys(each for each in (*found, *claimed) if each))


def _rows_of(ledger: Ledger, run: str) -> list[LedgerRow]:
    return ledger.rows(run, kinds=(ClaimRow, CheckpointRow), columns=_COLUMNS_OF_RUN)


def newer_in_store(
    ledger: Ledger, run: str, folder: str, files: StoreFiles, *, rows: Sequence[LedgerRow]
) -> Proof | None:
    """Return a committed checkpoint in the run's folder that the ledger lacks, or None. `rows` were read before."""
    proofs = lost_in_store(ledger.table_uuid, run, folder, files, rows=rows)
    known = checkpoint_rows(_rows_of(ledger, run)) if proofs else {}  # one may have been committed since
    lost = [each for each in proofs if each.checkpoint_id not in known]
    return max(lost, key=lambda each: each.step or 0, default=None)


def lost_in_store(uuid: str, run: str, folder: str, files: StoreFiles, *, rows: Sequence[LedgerRow]) -> list[Proof]:
    """Return proofs, from the run's folder, of committed checkpoints that are not in these rows of the ledger `uuid`.

    Folders are listed from the newest committed attempt on, because a lost checkpoint was committed after all known ones.
    Only marks and folders that no row names are read. In an intact ledger these are the left-overs of the last attempts.
    """
    rows_by_id = checkpoint_rows(rows)
    mark = commit_marked(folder, uuid, files)
    proofs = [] if mark is None or mark.run != run else [mark]
    strangers: set[str] = set()
    for address in unnamed_folders(folder, files, list(rows_by_id.values())):
        nonce = address.rpartition("-")[2]
        proof = None if nonce in strangers else proven_parent(address, files)
        if proof is not None and (proof.ledger_uuid, proof.run) != (uuid, run):
            strangers.add(nonce)  # of a run of this name in another lakehouse, or of another run
        elif proof is not None and proof.checkpoint_id not in rows_by_id:
            proofs.append(proof)
            break
    return [each for each in proofs if each.ledger_uuid == uuid and each.checkpoint_id not in rows_by_id]


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


def check_journal(lakehouse: Lakehouse, run: str | None = None, *, fill: float = 0) -> None:
    """Raise `LedgerOlderThanStore` if the journal has an append of a run, or of any run, that the ledger lacks.

    Entries that the journal lacks are written, if a run lacks up to `fill`. A journal that may not be listed proves nothing.
    """
    ledger = Ledger(lakehouse)
    try:
        with reachable(lakehouse.config.uri):
            journal = Journal.of(lakehouse.own("consumption"))
            entries = journal.entries(run or "")
    except CatalogUnreachable:
        raise
    except LakehouseError:  # a catalog's server may forbid listing its warehouse
        return
    if not (entries or fill):
        return
    for pause_s in LOOKS_AT_OLDER_S:
        known = ledger.appends() if run is None else {run: set(range(1, ledger.state(run).fence.seq + 1))}
        absent = {name: found.keys() - known.get(name, set()) for name, found in entries.items()}
        proven = {name: _proofs_in(journal, name, entries[name], seqs) for name, seqs in absent.items()}
        ahead = {name: proofs for name, proofs in proven.items() if proofs}
        if not ahead:
            break
        time.sleep(pause_s)  # a replica of the catalog may be late
    for name, proofs in ahead.items():
        _refuse(lakehouse, max(proofs, key=lambda each: each.step or 0), _rows_of(ledger, name))
    for name, seqs in known.items():
        lacking = seqs.difference(entries.get(name, ()))
        if 0 < len(lacking) <= fill:
            fill_journal(ledger, name, lacking)


def _proofs_in(journal: Journal, run: str, entries: Mapping[int, str], lost: set[int]) -> list[Proof]:
    """Return the evidence of entries that the ledger lacks. A copy of another append under a wrong name is none."""
    proofs = []
    for seq in sorted(lost):
        step = None
        try:
            entry = journal.read_entry(entries[seq])
            if not entry.is_of(run, seq):
                _log.warning(
                    "expected append %d of run %s in %s, found %s: the file was left out, move it away",
                    *(seq, run, journal.address_of(entries[seq]), entry.seqs),
                )
                continue
            step = max((row.step for row in checkpoint_rows(parse_rows(entry.rows)).values()), default=None)
        except LedgerError as err:  # its name is evidence enough
            _log.warning("%s", err)
        proofs.append(Proof(run=run, step=step, place=journal.address_of(entries[seq])))
    return proofs


def _refuse(lakehouse: Lakehouse, newer: Proof | None, rows: Sequence[LedgerRow]) -> None:
    """Raise `LedgerOlderThanStore` if there is something newer than these rows of its run."""
    if newer is None:
        return
    known = [row.step for row in checkpoint_rows(rows).values()]
    raise LedgerOlderThanStore(
        f"expected the newest ledger of run {newer.run!r}, found one whose newest step is {max(known, default=0)}, while "
        f"{'another append' if newer.step is None else f'step {newer.step}'} was committed as {newer.place!r} shows: the catalog "
        f"at {lakehouse.config.address!r} was restored from an older backup, or its ledger was lost; nothing was deleted: "
        f"{HOW_TO_RENEW}"
    )


def unnamed_folders(folder: str, files: StoreFiles, committed: Sequence[CheckpointRow]) -> list[str]:
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


def _json(address: str, files: StoreFiles) -> dict[str, Any]:
    """Return a JSON object. Empty if it is gone or cut short."""
    try:
        found = json.loads(files.read(address))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
