"""Recovery Coordinator: claim the run, find the checkpoint to resume from, prove that it is whole (design.md section 7).

The same four steps whatever failed: claim, resolve, load, resume. Killed anywhere, it can simply be started again.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from catalog.commits import Attempt, claim, quarantine
from catalog.connect import Lakehouse
from catalog.errors import CheckpointDamaged, LedgerError, NoRestorableCheckpoint, NoSuchTable, TableReplaced
from catalog.ledger import HEAD_KINDS, Ledger, Row, RunState
from catalog.plans import PlanRow, find_plan
from dlac_pipeline.checkpoint.manifest import Manifest, folder_of, read_manifest, verify_files
from dlac_pipeline.plan.follow import Unreadable, leaving_out, next_leg
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.legs import asked_for, first_leg
from dlac_pipeline.plan.planner import check_plan, load_plan, make_plan
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.spec import JobSpec, SourceSpec

_UNREPEATED = ("manifest_uri", "manifest_digest", "model_digest", "committed_at", "format_version", "run")
"""Columns of ledger rows that only their commit decides; manifests leave them out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where an attempt starts: behind a verified checkpoint, or at step 0."""

    attempt: int
    nonce: str
    replaces: int
    leg: str
    """The leg as JSON; committed already unless `leg_is_new`."""
    leg_is_new: bool
    step: int = 0
    checkpoint_id: str | None = None
    folder: str | None = None
    world_size: int = 0
    engine: str = ""
    reader_state: list[list[list[int]]] | None = None
    """Cursor of each source and key group: [pass, block, position, offset]."""
    rows_since: list[dict[str, Any]] | None = None
    quarantined: list[str] | None = None
    claim_s: float = 0.0
    verify_s: float = 0.0

    def to_json(self) -> str:
        """This resume point, for the ranks."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> ResumePoint:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def new_nonce() -> str:
    """A name for one launch that no other launch has."""
    return secrets.token_hex(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a launch wants besides resuming: which plans a new run takes, and what a new leg may change."""

    plan_ids: tuple[str, ...] = ()
    """Of each source, for a run that begins; empty: plan the sources as the spec says."""
    repin: bool = False
    """Go on to what happened to followed tables since they were planned."""
    unreadable: tuple[Unreadable, ...] = ()
    """Row groups to leave out from now on."""


RESUME = Wish()
"""Only resume."""


def take_over(
    lakehouse: Lakehouse,
    spec: JobSpec,
    *,
    nonce: str,
    replaces: int | None = None,
    wish: Wish = RESUME,
    launch_folder: str = "",
    launched_by: str = "",
) -> ResumePoint:
    """Claim the run for `nonce` and say where it resumes.

    `replaces` is the attempt seen to have failed; unset, it is the one that is current now. `launched_by` names the
    orchestrator's run, so that a sensor can tell whose attempt is current.

    Raises:
        SteppedAside, RunFinished: from the claim.
        ResumeMismatch: the spec asks for something else than what the run's leg binds; nothing was claimed.
        NoRestorableCheckpoint: every checkpoint of the lineage is damaged.
        AppendHistoryLost: what was appended to a followed table cannot be told apart any more; nothing was claimed.
    """
    ledger = Ledger(lakehouse)
    started = time.monotonic()
    before = ledger.state(spec.run)
    chooser = _LegChooser(ledger, spec, wish, recovering=replaces is not None)
    leg = chooser.before_claim(before)
    current = before.fence.attempt - (before.fence.nonce == nonce)  # an earlier try of this very claim may have landed
    replaced = current if replaces is None else replaces
    detail = {
        "host": socket.gethostname(),
        "launch_folder": launch_folder,
        "launched_by": launched_by,
        "plan_ids": [source.plan_id for source in leg.sources],
    }
    state = claim(ledger, spec.run, nonce=nonce, replaces=replaced, detail=detail)
    attempt = Attempt(run=spec.run, number=state.fence.attempt, nonce=nonce)
    claimed = time.monotonic()
    rows = ledger.rows(spec.run, kinds=HEAD_KINDS)
    if state.fence.head != before.fence.head:  # the attempt that was replaced committed in between
        chooser.check(leg_of(rows, state.fence.head or ""))
    manifest, damaged = _newest_whole(rows, state.fence.head)
    if damaged:
        head_after = None if manifest is None else manifest.checkpoint_id
        state = quarantine(ledger, attempt, damaged=damaged, head_after=head_after)
        if manifest is None:
            raise NoRestorableCheckpoint(
                f"none of the checkpoints of run {spec.run!r} can be restored; damaged: {damaged!r}; "
                "start a run under another name"
            )
        rows = ledger.rows(spec.run, kinds=HEAD_KINDS)
    if (manifest.checkpoint_id if manifest else None) != before.fence.head:
        leg = chooser.at(rows, manifest)
    return _resume_point(
        attempt,
        replaced,
        leg,
        rows,
        manifest,
        quarantined=list(damaged),
        claim_s=claimed - started,
        verify_s=time.monotonic() - claimed,
    )


class _LegChooser:
    """Which leg a launch trains: the committed one, the one behind it, or a new run's first."""

    def __init__(self, ledger: Ledger, spec: JobSpec, wish: Wish, *, recovering: bool) -> None:
        self._ledger = ledger
        self._lakehouse = ledger.lakehouse
        self._spec = spec
        self._wish = wish
        self._recovering = recovering

    def before_claim(self, state: RunState) -> Leg:
        """The leg, as far as the ledger tells before anything is claimed or verified."""
        rows = self._ledger.rows(self._spec.run, kinds=HEAD_KINDS)
        head = checkpoint_rows(rows).get(state.fence.head or "")
        if head is None:
            return self.at(rows, None)
        try:
            manifest = read_manifest(head["manifest_uri"], head["manifest_digest"])
        except CheckpointDamaged:  # found again and dealt with under the claim
            return leg_of(rows, head["checkpoint_id"])
        return self.at(rows, manifest)

    def at(self, rows: list[Row], manifest: Manifest | None) -> Leg:
        """The leg of an attempt that resumes behind this checkpoint.

        Raises:
            ResumeMismatch: the spec asks for something else, and no new leg was asked for.
        """
        if manifest is None:
            return self._first(rows)
        leg = leg_of(rows, manifest.checkpoint_id)
        asked = self.check(leg)
        for source, mine in zip(self._spec.sources, leg.sources, strict=True):
            for plan_id in mine.start.plan_ids:
                check_plan(self._lakehouse, plan_id, table=source.table)
        return next_leg(
            self._lakehouse,
            self._spec,
            leg,
            asked,
            step=manifest.step,
            state=[[Cursor(*cursor) for cursor in cursors] for cursors in manifest.reader_state],
            repin=self._wish.repin,
            unreadable=self._wish.unreadable,
        )

    def check(self, leg: Leg) -> Leg:
        """What the spec asks for where `leg` is committed.

        Raises:
            ResumeMismatch: something else, and no new leg was asked for.
            TableReplaced: a table was dropped and created again.
        """
        uuids = self._table_uuids()
        for mine in leg.sources:
            if uuids.get(mine.table, mine.table_uuid) != mine.table_uuid:
                raise TableReplaced(
                    f"expected table {mine.table!r} to be the planned one (uuid {mine.table_uuid}), found uuid "
                    f"{uuids[mine.table]}: it was dropped and created again; start a new run on the new table"
                )
        asked = asked_for(self._spec, leg, uuids)
        if self._wish.plan_ids and self._wish.plan_ids != tuple(source.plan_id for source in leg.sources):
            asked = replace(
                asked,
                sources=tuple(
                    replace(source, plan_id=plan_id)
                    for source, plan_id in zip(asked.sources, self._wish.plan_ids, strict=True)
                ),
            )
        if not self._spec.launch.new_leg:
            leg.check_same(asked)
        return asked

    def _first(self, rows: list[Row]) -> Leg:
        """The leg that the run begins with; the plans of an attempt that is recovered, if the spec still asks for them."""
        if checkpoint_rows(rows):
            raise NoRestorableCheckpoint(
                f"every checkpoint of run {self._spec.run!r} is quarantined: start a run under another name"
            )
        plan_ids = self._wish.plan_ids or (self._claimed_plans(rows) if self._recovering else ())
        plans = (
            [load_plan(self._lakehouse, plan_id) for plan_id in plan_ids]
            if plan_ids
            else [make_plan(self._lakehouse, source) for source in self._spec.sources]
        )
        return leaving_out(self._lakehouse, self._spec, first_leg(self._spec, plans), self._wish.unreadable)

    def _claimed_plans(self, rows: list[Row]) -> tuple[str, ...]:
        """The plans for which the attempt to be recovered had claimed the run, if they are still what the spec asks for."""
        claims = [row for row in rows if row["kind"] == "claim"]
        plan_ids = json.loads(claims[-1]["detail"]).get("plan_ids", []) if claims else []
        found = [find_plan(self._lakehouse, plan_id) for plan_id in plan_ids]
        fits = len(found) == len(self._spec.sources) and all(
            row is not None and _is_plan_of(source, row) for source, row in zip(self._spec.sources, found, strict=True)
        )
        return tuple(plan_ids) if fits else ()

    def _table_uuids(self) -> dict[str, str]:
        found = {}
        for source in self._spec.sources:
            with suppress(NoSuchTable):  # said by name where the leg needs it
                found[source.table] = str(self._lakehouse.load(source.table).metadata.table_uuid)
        return found


def _is_plan_of(source: SourceSpec, row: PlanRow) -> bool:
    return (
        (row.source_table, row.row_filter) == (source.table, source.row_filter)
        and json.loads(row.columns) == source.columns
        and json.loads(row.exclude) == source.exclude
        and source.snapshot_id in (None, row.snapshot_id)
    )


def leg_of(rows: list[Row], checkpoint_id: str) -> Leg:
    """The leg that a checkpoint ends in: the last one that it or one of its ancestors names."""
    checkpoints = checkpoint_rows(rows)
    legs = {row["checkpoint_id"]: row["detail"] for row in rows if row["kind"] == "leg"}
    at: str | None = checkpoint_id
    while at is not None and at not in legs:
        at = checkpoints[at]["parent"]
    if at is None:
        raise LedgerError(
            f"expected the leg of checkpoint {checkpoint_id!r} in the ledger, found none: restore the table"
        )
    return Leg.from_json(legs[at])


def checkpoint_rows(rows: list[Row]) -> dict[str, Row]:
    """Checkpoint id -> its checkpoint row."""
    return {row["checkpoint_id"]: row for row in rows if row["kind"] == "checkpoint"}


def _newest_whole(rows: list[Row], head: str | None) -> tuple[Manifest | None, dict[str, str]]:
    """The nearest ancestor-or-self of the head whose digests hold, and the damaged ones before it (id -> reason)."""
    checkpoints = checkpoint_rows(rows)
    out = {row["checkpoint_id"] for row in rows if row["kind"] in ("quarantine", "retire")}
    damaged: dict[str, str] = {}
    while head is not None:
        row = checkpoints[head]
        if head not in out:
            try:
                manifest = read_manifest(row["manifest_uri"], row["manifest_digest"])
                verify_files(manifest, folder_of(row["manifest_uri"]))
                return manifest, damaged
            except CheckpointDamaged as err:
                damaged[head] = str(err)
        head = row["parent"]
    return None, damaged


def _resume_point(
    attempt: Attempt,
    replaced: int,
    leg: Leg,
    rows: list[Row],
    manifest: Manifest | None,
    *,
    quarantined: list[str],
    claim_s: float,
    verify_s: float,
) -> ResumePoint:
    base = ResumePoint(
        attempt=attempt.number,
        nonce=attempt.nonce,
        replaces=replaced,
        leg=leg.to_json(),
        leg_is_new=manifest is None or leg.index != leg_of(rows, manifest.checkpoint_id).index,
        quarantined=quarantined,
        claim_s=claim_s,
        verify_s=verify_s,
    )
    if manifest is None:
        return replace(base, rows_since=_since(rows, 0))
    row = checkpoint_rows(rows)[manifest.checkpoint_id]
    return replace(
        base,
        step=manifest.step,
        checkpoint_id=manifest.checkpoint_id,
        folder=str(folder_of(row["manifest_uri"])),
        world_size=manifest.world_size,
        engine=manifest.engine,
        reader_state=manifest.reader_state,
        rows_since=_since(rows, int(row["seq"])),
    )


def _since(rows: list[Row], seq: int) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if value is not None and name not in _UNREPEATED}
        for row in rows
        if int(row["seq"]) > seq
    ]


def launch_folder_of(rows: list[Row], attempt: int) -> str:
    """The launch folder that an attempt's claim names; empty if it has none."""
    return _claim_detail(rows, attempt, "launch_folder")


def launcher_of(rows: list[Row], attempt: int) -> str:
    """The orchestrator's run that launched an attempt; empty if it was started by hand."""
    return _claim_detail(rows, attempt, "launched_by")


def _claim_detail(rows: list[Row], attempt: int, name: str) -> str:
    claims = [row for row in rows if row["kind"] == "claim" and row["attempt"] == attempt]
    return str(json.loads(claims[-1]["detail"]).get(name, "")) if claims else ""


def attempts_without_progress(rows: list[Row]) -> int:
    """Claims since the last committed checkpoint, or since the beginning."""
    last = max((int(row["seq"]) for row in rows if row["kind"] == "checkpoint"), default=0)
    return sum(1 for row in rows if row["kind"] == "claim" and int(row["seq"]) > last)
