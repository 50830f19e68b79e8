"""Pins of source tables: the runs that need them, the files that they hold, pinning and unpinning.

A pin is a tag `dlac-pin-<snapshot id>`. The ledger shows which runs need it: the legs that may be read name plans, and a plan
names its snapshot. Tables count by their uuid: a renamed table is the same.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal

from pyiceberg.exceptions import AuthorizationExpiredError, ForbiddenError, UnauthorizedError
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.table import Table

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.columns import expect
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.snapshots import is_pinned, pin, pin_tag, snapshot_of, table_name
from dlac_pipeline.lakehouse.ledger import run_rows
from dlac_pipeline.lakehouse.ledger.branches import left_by_rewinds
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, ClaimRow, Columns, LedgerRow, LegRow
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

_PREFIX = pin_tag(0).removesuffix("0")
_PLAN_ID = re.compile(r"\b[0-9a-f]{24}\b")
_REFUSED = (ForbiddenError, UnauthorizedError, AuthorizationExpiredError)
_REFUSALS = ("readonly database", "read-only", "permission denied", "access denied", "access_denied", "not authorized")
_UNTAGGED = (
    "Without a tag every guarantee holds until the snapshot is expired. After that the run stops with an error, "
    "and never continues with other rows"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PinUse:
    """A run that planned a pinned snapshot. `needed`: it may still read such a leg, or an operator may go back to it."""

    run: str
    finished: bool
    needed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A pinned snapshot of a table. Its held data files are reached by no other tag and by no branch."""

    table: str
    snapshot_id: int
    tag: str
    committed_at: datetime
    """Moment at which the snapshot was made."""
    pinned_at: datetime | None
    """Moment at which the first plan of it was made, or None."""
    plan_ids: tuple[str, ...]
    uses: tuple[PinUse, ...]
    held_files: int
    held_bytes: int

    @property
    def needed_by(self) -> tuple[str, ...]:
        """The runs that need it."""
        return tuple(use.run for use in self.uses if use.needed)


@dataclass(frozen=True)
class _RunRows:
    rows: Sequence[LedgerRow]

    @property
    def finished(self) -> bool:
        return run_rows.finished_of_rows(self.rows)

    @cached_property
    def used(self) -> frozenset[str]:
        """The plans of all legs, and tables with the snapshots that were planned last."""
        return frozenset(_named(row for row in self.rows if isinstance(row, LegRow | ClaimRow)))

    @cached_property
    def needed(self) -> frozenset[str]:
        """The legs that may still be read. Of a finished run those to which an operator may go back after a rewind."""
        restorable = set(run_rows.restorable_rows(self.rows))
        if self.finished:
            head = run_rows.fence_of_rows(self.rows).head
            restorable &= left_by_rewinds(self.rows) - set(run_rows.lineage_of(self.rows, head))
        checkpoints = run_rows.checkpoint_rows(self.rows)
        indices = {checkpoints[each].leg for each in restorable}
        legs = [row for row in self.rows if isinstance(row, LegRow)]
        needed: list[LegRow | ClaimRow] = [row for row in legs if row.leg in indices]
        if not self.finished:
            needed += [*legs[-1:], *[row for row in self.rows if isinstance(row, ClaimRow)][-1:]]
        return frozenset(_named(needed))


def list_pins(lakehouse: Lakehouse, identifier: str | None = None) -> list[Pin]:
    """The pins of one table, or of every planned one, the oldest snapshot first. Raises `NoSuchTable`."""
    plans = _plans(lakehouse)
    runs = _runs(lakehouse)
    if identifier is not None:
        return _pins_of(lakehouse.load(identifier), identifier, plans, runs)
    found: list[Pin] = []
    for name in sorted({str(plan["source_table"]) for plan in plans}):
        try:
            table = lakehouse.load(name)
        except errors.NoSuchTable:  # dropped since: there is nothing left to hold back
            continue
        found += _pins_of(table, name, plans, runs)
    return found


def pins_table(lakehouse: Lakehouse, run_or_table: str | None = None) -> list[Pin]:
    """Return the pins that a run uses, or else the pins of a table, or all pins. Raises `NoSuchTable` for another name."""
    if run_or_table is not None and run_or_table not in _runs(lakehouse):
        return list_pins(lakehouse, run_or_table)
    pins = list_pins(lakehouse)
    return [one for one in pins if run_or_table is None or any(use.run == run_or_table for use in one.uses)]


def remove_pin(lakehouse: Lakehouse, identifier: str, snapshot_id: int, *, force: bool = False) -> bool:
    """Remove the pin of a snapshot. Return False if it has none. Expiry may then remove what only the pin held.

    Raises `SpecInvalid` if a run needs it, unless `force` is set, and `PinLost` if the tag is another's or cannot be removed.
    """
    tag = pin_tag(snapshot_id)

    def once() -> bool:
        table = lakehouse.load(identifier)
        if not is_pinned(table, identifier, snapshot_id):
            return False
        uses = () if force else _uses(table, snapshot_id, _plans(lakehouse), _runs(lakehouse))
        if needed := [use.run for use in uses if use.needed]:
            raise errors.SpecInvalid(
                f"expected no run to need snapshot {snapshot_id} of {identifier!r}, found {needed!r}: let them finish first, and "
                "retire what rewinds have left; with force they stop with PinLost as soon as the snapshot is expired"
            )
        with reachable(lakehouse.catalog_of(identifier)[0].config.uri), as_commit_conflict():
            table.manage_snapshots().remove_tag(tag).commit()
        return True

    try:
        return retrying(of=errors.CommitConflict)(once)
    except errors.CommitConflict as err:
        raise errors.PinLost(
            f"tag {tag!r} of {identifier!r} did not go away: {err}; other writers are busy, try again"
        ) from err


def release_pins(lakehouse: Lakehouse, run: str, identifier: str) -> list[int]:
    """Remove the pins of a table that a run has used and that no run needs any more. Return their snapshots.

    If a plan exists that no run has claimed, the pin stays, because a dataset may be reading it. A run that plans such a
    snapshot at this moment becomes known by its claim. If the claim comes during the removal, the pin is taken again. If it
    comes later, the run finds its pin lost before it reads, and plans again at its next launch.

    Raises `NoSuchTable`, `PinLost`, or `NoSuchSnapshot` if a snapshot was claimed, and expired, while it had no pin.
    """
    table = lakehouse.load(identifier)
    pinned = [ref.snapshot_id for tag, ref in table.refs().items() if tag == pin_tag(ref.snapshot_id)]
    plans, runs = _plans(lakehouse), _runs(lakehouse)
    claimed = frozenset[str]().union(*(rows.used for rows in runs.values()))
    gone = []
    for snapshot_id in pinned:
        uses = _uses(table, snapshot_id, plans, runs)
        read_by_others = any(plan["plan_id"] not in claimed for plan in _plans_of(table, snapshot_id, plans))
        if run in {use.run for use in uses} and not (read_by_others or any(use.needed for use in uses)):
            gone += [snapshot_id] if remove_pin(lakehouse, identifier, snapshot_id, force=True) else []
    plans, runs = (_plans(lakehouse), _runs(lakehouse)) if gone else ([], {})
    wanted = [each for each in gone if any(use.needed for use in _uses(table, each, plans, runs))]
    for snapshot_id in wanted:
        pin(lakehouse, identifier, snapshot_id)
    return [each for each in gone if each not in wanted]


def hold(lakehouse: Lakehouse, identifier: str, snapshot_id: int, how: Literal["tag", "none"]) -> str:
    """Keep a snapshot alive as the source's `pin` setting defines. Return the tag's name, or "" without a tag.

    Raises `SpecInvalid` if the table cannot be tagged, `PinLost` if the tag does not stay, or `NoSuchSnapshot`.
    """
    snapshot_of(lakehouse.load(identifier), snapshot_id)  # a snapshot that cannot be read is another failure
    if how == "none":
        return ""
    try:
        return pin(lakehouse, identifier, snapshot_id)
    except NotImplementedError as err:
        raise errors.SpecInvalid(
            f"expected to tag snapshot {snapshot_id} of {identifier!r}, found that pyiceberg cannot write this table's format "
            f'({err}): set pin = "none" for this source. {_UNTAGGED}'
        ) from err
    except errors.LakehouseError as err:
        cause = err.__cause__ or err
        text = str(cause).lower()
        if not isinstance(cause, (*_REFUSED, PermissionError)) and not any(sign in text for sign in _REFUSALS):
            raise
        raise errors.SpecInvalid(
            f"expected to tag snapshot {snapshot_id} of {identifier!r}, found that this source may only be read "
            f'({type(cause).__name__}): set pin = "none" for this source, or have the right to tag it granted. '
            + _UNTAGGED
        ) from err


def _plans(lakehouse: Lakehouse) -> list[Columns]:
    names = ("plan_id", "source_table", "table_uuid", "snapshot_id", "created_at")
    rows: list[Columns] = lakehouse.read_own("plans", columns=names).to_pylist()
    return rows


def _runs(lakehouse: Lakehouse) -> dict[str, _RunRows]:
    names = (
        "run",
        "seq",
        "kind",
        "attempt",
        "nonce",
        "checkpoint_id",
        "parent",
        "head_after",
        "leg",
        "claim",
        "leg_json",
    )
    return {run: _RunRows(found) for run, found in Ledger(lakehouse).rows_of_runs(HEAD_KINDS, columns=names).items()}


def _named(rows: Iterable[LegRow | ClaimRow]) -> Iterator[str]:
    """Every plan id in these rows, and `table@snapshot` of every table that they name with one."""
    for row in rows:
        if isinstance(row, LegRow):
            yield from _PLAN_ID.findall(json.dumps(row.record))
            sources = row.record.get("sources", ())
            yield from (_key(str(each.get("table_uuid")), each.get("snapshot_id")) for each in sources)
        else:
            yield from (*row.plan_ids, *row.leg_plan_ids)
            yield from (_key(each.table_uuid, each.snapshot_id) for each in row.planned)


def _key(table_uuid: str, snapshot_id: object) -> str:
    return f"{table_uuid}@{snapshot_id}"


def _plans_of(table: Table, snapshot_id: int, plans: Iterable[Columns]) -> list[Columns]:
    wanted = (str(table.metadata.table_uuid), snapshot_id)
    return [plan for plan in plans if (plan["table_uuid"], plan["snapshot_id"]) == wanted]


def _uses(table: Table, snapshot_id: int, plans: Sequence[Columns], runs: Mapping[str, _RunRows]) -> tuple[PinUse, ...]:
    mine = {plan["plan_id"] for plan in _plans_of(table, snapshot_id, plans)}
    names = mine | {_key(str(table.metadata.table_uuid), snapshot_id)}
    return tuple(
        PinUse(run=run, finished=rows.finished, needed=not names.isdisjoint(rows.needed))
        for run, rows in sorted(runs.items())
        if not names.isdisjoint(rows.used)
    )


def _pins_of(table: Table, name: str, plans: Sequence[Columns], runs: Mapping[str, _RunRows]) -> list[Pin]:
    files_of = _held_by_one(table)
    found = []
    for tag, ref in table.refs().items():
        snapshot = table.snapshot_by_id(ref.snapshot_id)
        if not tag.startswith(_PREFIX) or snapshot is None:
            continue
        mine = _plans_of(table, ref.snapshot_id, plans)
        files = files_of.get(tag, {})
        one = Pin(
            table=name,
            snapshot_id=ref.snapshot_id,
            tag=tag,
            committed_at=datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC),
            pinned_at=min((plan["created_at"] for plan in mine), default=None),
            plan_ids=tuple(sorted(plan["plan_id"] for plan in mine)),
            uses=_uses(table, ref.snapshot_id, plans, runs),
            held_files=len(files),
            held_bytes=sum(files.values()),
        )
        found.append(one)
    return sorted(found, key=lambda one: (one.committed_at, one.snapshot_id))


def _held_by_one(table: Table) -> dict[str, dict[str, int]]:
    """Return ref -> the data files (path -> bytes) that nothing else reaches. Empty unless a pin alone holds some."""
    if not any(name.startswith(_PREFIX) for name in table.refs()):
        return {}
    manifests: dict[str, ManifestFile] = {}
    reached_by: dict[str, list[str]] = defaultdict(list)
    with expect(f"the manifests of table {table_name(table)!r}", "restore them"):
        for name, ref in table.refs().items():
            snapshot = table.snapshot_by_id(ref.snapshot_id)
            for manifest in snapshot.manifests(table.io) if snapshot is not None else ():
                if manifest.content == ManifestContent.DATA:
                    manifests[manifest.manifest_path] = manifest
                    reached_by[manifest.manifest_path].append(name)
        alone = {names[0] for names in reached_by.values() if len(names) == 1}
        if not any(name.startswith(_PREFIX) for name in alone):  # the usual case: no file is held back yet
            return {}
        only: dict[str, str | None] = {}
        sizes: dict[str, int] = {}
        for path, manifest in manifests.items():
            owner = reached_by[path][0] if len(reached_by[path]) == 1 else None
            for entry in manifest.fetch_manifest_entry(table.io):
                file = entry.data_file
                only[file.file_path] = owner if only.get(file.file_path, owner) == owner else None
                sizes[file.file_path] = file.file_size_in_bytes
    files_of: dict[str, dict[str, int]] = defaultdict(dict)
    for path, owner in only.items():
        if owner is not None:
            files_of[owner][path] = sizes[path]
    return files_of
