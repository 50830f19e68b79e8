"""Pins of source tables: the runs that need them, pinning and unpinning.

A pin is a tag `dlac-pin-<snapshot id>`. The ledger shows which runs need it: the legs that may be read name plans, and a plan
names its snapshot. Tables count by their uuid: a renamed table is the same.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pyiceberg.exceptions import AuthorizationExpiredError, ForbiddenError, UnauthorizedError
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.snapshots import is_pinned, pin, pin_tag, snapshot_of
from dlac_pipeline.lakehouse.ledger import run_rows
from dlac_pipeline.lakehouse.ledger.branches import left_by_rewinds
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, ClaimRow, Columns, LedgerRow, LegRow
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

_PLAN_ID = re.compile(r"\b[0-9a-f]{24}\b")
_ENTERS_WITHIN_S = 86_400.0
"""Seconds since its last row in the ledger, in which a run that follows a table may enter a snapshot that no row names."""
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


@dataclass(frozen=True)
class RunRows:
    """The rows of a run that show which plans it uses and needs."""

    rows: Sequence[LedgerRow]

    @property
    def finished(self) -> bool:
        """True if the run is finished."""
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

    def may_enter(self, table: Table, snapshot_id: int) -> bool:
        """Return whether the run has trained lately, follows the table, and has recorded no snapshot as late as this one."""
        legs = [row for row in self.rows if isinstance(row, LegRow)]
        if self.finished or not legs or time.time() - self.rows[-1].committed_at.timestamp() > _ENTERS_WITHIN_S:
            return False
        snapshot = table.snapshot_by_id(snapshot_id)
        for source in legs[-1].record["sources"]:
            if source.get("follow") != "appends" or source["table_uuid"] != str(table.metadata.table_uuid):
                continue
            last = table.snapshot_by_id(source["snapshot_id"])
            if last is None or (snapshot is not None and _number(snapshot) > _number(last)):
                return True
        return False


def _number(snapshot: Snapshot) -> int:
    return snapshot.sequence_number or 0


def remove_pin(lakehouse: Lakehouse, identifier: str, snapshot_id: int, *, force: bool = False) -> bool:
    """Remove the pin of a snapshot. Return False if it has none. Expiry may then remove what only the pin held.

    Raises `SpecInvalid` if a run needs it, unless `force` is set, and `PinLost` if the tag is another's or cannot be removed.
    """
    tag = pin_tag(snapshot_id)

    def once() -> bool:
        table = lakehouse.load(identifier)
        if not is_pinned(table, identifier, snapshot_id):
            return False
        uses = () if force else uses_of(table, snapshot_id, read_plans(lakehouse), read_runs(lakehouse))
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
    plans, runs = read_plans(lakehouse), read_runs(lakehouse)
    claimed = frozenset[str]().union(*(rows.used for rows in runs.values()))
    gone = []
    for snapshot_id in pinned:
        uses = uses_of(table, snapshot_id, plans, runs)
        read_by_others = any(plan["plan_id"] not in claimed for plan in plans_of(table, snapshot_id, plans))
        if run in {use.run for use in uses} and not (read_by_others or any(use.needed for use in uses)):
            gone += [snapshot_id] if remove_pin(lakehouse, identifier, snapshot_id, force=True) else []
    plans, runs = (read_plans(lakehouse), read_runs(lakehouse)) if gone else ([], {})
    wanted = [each for each in gone if any(use.needed for use in uses_of(table, each, plans, runs))]
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


def read_plans(lakehouse: Lakehouse) -> list[Columns]:
    """Return all plans: id, table and snapshot, and moment."""
    names = ("plan_id", "source_table", "table_uuid", "snapshot_id", "created_at")
    rows: list[Columns] = lakehouse.read_own("plans", columns=names).to_pylist()
    return rows


def read_runs(lakehouse: Lakehouse) -> dict[str, RunRows]:
    """Return run -> its rows."""
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
        "committed_at",
    )
    return {run: RunRows(found) for run, found in Ledger(lakehouse).rows_of_runs(HEAD_KINDS, columns=names).items()}


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


def plans_of(table: Table, snapshot_id: int, plans: Iterable[Columns]) -> list[Columns]:
    """Return the plans of one snapshot."""
    wanted = (str(table.metadata.table_uuid), snapshot_id)
    return [plan for plan in plans if (plan["table_uuid"], plan["snapshot_id"]) == wanted]


def uses_of(
    table: Table, snapshot_id: int, plans: Sequence[Columns], runs: Mapping[str, RunRows]
) -> tuple[PinUse, ...]:
    """Return the runs that planned a snapshot, or may have entered it in place and not recorded that yet, by name."""
    mine = {plan["plan_id"] for plan in plans_of(table, snapshot_id, plans)}
    names = mine | {_key(str(table.metadata.table_uuid), snapshot_id)}
    found = []
    for run, rows in sorted(runs.items()):
        enters = rows.may_enter(table, snapshot_id)
        if enters or not names.isdisjoint(rows.used):
            needed = enters or not names.isdisjoint(rows.needed)
            found.append(PinUse(run=run, finished=rows.finished, needed=needed))
    return tuple(found)
