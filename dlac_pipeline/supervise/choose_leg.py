"""Choice of the leg that a launch trains: the committed one, its successor, or the first of a new run."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dlac_pipeline.checkpoint.manifest import Manifest
from dlac_pipeline.checkpoint.restore.verified_copy import manifest_of
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.branches import exclusions_in_force, starts_over
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState
from dlac_pipeline.lakehouse.ledger.plans import PlanRow
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of, way_out
from dlac_pipeline.plan.legs.choice import check_sources, first_leg, plan_sources, requested_leg
from dlac_pipeline.plan.legs.follow import LegRequest, leaving_out, next_leg
from dlac_pipeline.plan.legs.leg import Leg, Unreadable
from dlac_pipeline.plan.order import reader_state_of
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec, SourceSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """Requests of a launch beyond resuming, by default none: the plans of a new run, and the changes of a new leg."""

    plans: tuple[PlanRow, ...] = ()
    """Plan of each source, for a new run. If empty, the sources of the spec are planned before the claim."""
    repin: bool = False
    """True to continue with the changes of followed tables since they were planned."""
    unreadable: tuple[Unreadable, ...] = ()
    """Row groups to leave out from this launch on."""
    spike_step: int = 0
    """Step up to which loss spikes are trained through, because rows were left out for them."""


class LegChooser:
    """Chooser of the leg that a launch trains."""

    def __init__(
        self, ledger: Ledger, plans: Plans, spec: JobSpec, options: ResumeOptions, *, recovering: bool
    ) -> None:
        """Check the options. Raise `SpecInvalid` if they name plans for another number of sources."""
        self.ledger = ledger
        self._lakehouse = ledger.lakehouse
        self._plans = plans
        self._spec = spec
        self._options = options
        self._recovering = recovering
        self.damage = ""
        """Damage of the head's manifest that was found before the claim, or empty. The claim finds it again and handles it."""
        self.unsure = False
        """True if the head looked damaged before the claim, and no leg in memory continues it: its leg was not checked."""
        if options.plans and len(options.plans) != len(spec.sources):
            raise errors.SpecInvalid(
                f"expected a plan for each of the {len(spec.sources)} sources of run {spec.run!r}, found {len(options.plans)}: "
                "name them in the order of the sources, or none"
            )

    def before_claim(self, state: RunState, in_memory: Callable[[], Iterable[Leg]]) -> Leg:
        """Return the leg, as far as the ledger shows it before anything is claimed or verified.

        `in_memory` returns the legs of states in memory, the newest first. If the head's manifest is damaged, one of these is
        taken that the spec requests, and that the head ends in or is followed by.
        """
        rows = self.ledger.rows(self._spec.run, kinds=typed_rows.HEAD_KINDS)
        head = checkpoint_rows(rows).get(state.fence.head or "")
        if head is None:
            return self.at(rows, None)
        try:
            manifest = manifest_of(head, tiers_of(self._spec))
        except errors.CheckpointDamaged as err:
            self.damage, committed = str(err), leg_of(rows, head.checkpoint_id)
            found = (leg for leg in in_memory() if leg.index in (committed.index, committed.index + 1))
            leg = next((each for each in found if self._continues(each, rows)), None)
            self.unsure = leg is None
            return leg or committed
        return self.at(rows, manifest)

    def _continues(self, leg: Leg, rows: Sequence[typed_rows.LedgerRow]) -> bool:
        """Return whether the launch requests this leg, and its plans can be read."""
        try:
            requested = self.check(leg, rows)
            self._check_plans(leg)
        except (errors.ResumeMismatch, errors.LakehouseError):
            return False
        return requested.bound() == leg.bound() and not self._options.unreadable

    def at(self, rows: list[typed_rows.LedgerRow], manifest: Manifest | None) -> Leg:
        """Return the leg of an attempt that resumes after this checkpoint. Raises as `check`."""
        if manifest is None:
            return self._first(rows)
        leg = leg_of(rows, manifest.checkpoint_id)
        requested = self.check(leg, rows)
        self._check_plans(leg)
        spec = excluding(self._spec, exclusions_in_force(rows))
        request = LegRequest(requested=requested, repin=self._options.repin, unreadable=self._options.unreadable)
        state = reader_state_of(manifest.reader_state)
        return next_leg(self._plans, spec, leg, request, step=manifest.step, state=state)

    def _check_plans(self, leg: Leg) -> None:
        for source, mine in zip(self._spec.sources, leg.sources, strict=True):
            for plan_id in mine.start.plan_ids:
                self._plans.check(plan_id, table=source.table)
            self._plans.check_files(mine.start.live_plan_ids, table=source.table)

    def check(self, leg: Leg, rows: Sequence[typed_rows.LedgerRow]) -> Leg:
        """Check the requests of the spec and of the run's rewinds against `leg`. Exclusions of rewinds need no new leg.

        Raise `ResumeMismatch` if they differ and no new leg was requested, or if the number of sources differs, `TableReplaced`
        if a table was dropped and created again.
        """
        check_sources(self._spec, leg)
        uuids = {}
        for source in self._spec.sources:
            with suppress(errors.NoSuchTable):  # reported with its name where the leg needs the table
                uuids[source.table] = str(self._lakehouse.load(source.table).metadata.table_uuid)
        for mine in leg.sources:
            check_same_table(mine.table, planned_uuid=mine.table_uuid, uuid=uuids.get(mine.table, mine.table_uuid))
        excluded = exclusions_in_force(rows)
        requested = requested_leg(excluding(self._spec, excluded), leg, uuids)
        if self._options.plans:
            named = zip(requested.sources, self._options.plans, strict=True)
            sources = tuple(replace(source, plan_id=plan.plan_id) for source, plan in named)
            requested = replace(requested, sources=sources)
        if not self._spec.launch.new_leg:
            kept = (replace(each, exclude=_with(each.exclude, i, excluded)) for i, each in enumerate(leg.sources))
            replace(leg, sources=tuple(kept)).check_same(requested)
        return requested

    def _first(self, rows: list[typed_rows.LedgerRow]) -> Leg:
        """Return the first leg: with the plans of a recovered attempt, or after a rewind with the snapshots of the first leg."""
        again = starts_over(rows)
        if checkpoint_rows(rows) and not again:
            raise errors.NoRestorableCheckpoint(
                f"every checkpoint on the lineage of run {self._spec.run!r} is quarantined: {way_out(self._spec.run, rows)}"
            )
        spec = _as_it_began(excluding(self._spec, exclusions_in_force(rows)), rows) if again else self._spec
        claimed = self._claimed_plans(rows) if self._recovering and not again else ()
        known = tuple(plan.plan_id for plan in self._options.plans) or claimed
        plans = [self._plans.load(plan_id) for plan_id in known] or [
            self._plans.add(plan) for plan in plan_sources(self._lakehouse, spec)
        ]
        return leaving_out(self._plans, spec, first_leg(spec, plans), self._options.unreadable)

    def _claimed_plans(self, rows: list[typed_rows.LedgerRow]) -> tuple[str, ...]:
        """Return the plans that the attempt to be recovered had claimed, if the spec still requests them."""
        claims = [row for row in rows if isinstance(row, typed_rows.ClaimRow)]
        plan_ids = claims[-1].plan_ids if claims else ()
        found = [self._plans.find_row(plan_id) for plan_id in plan_ids]
        fits = len(found) == len(self._spec.sources) and all(
            row is not None and _is_plan_of(source, row) for source, row in zip(self._spec.sources, found, strict=True)
        )
        return tuple(plan_ids) if fits else ()


def excluding(spec: JobSpec, exclusions: Sequence[typed_rows.Exclusion]) -> JobSpec:
    """Return the spec with the exclusions of rewinds after its own, without repeats."""
    sources = [
        source.model_copy(update={"exclude": list(_with(source.exclude, index, exclusions))})
        for index, source in enumerate(spec.sources)
    ]
    return spec.with_sources(sources)


def _as_it_began(spec: JobSpec, rows: Sequence[typed_rows.LedgerRow]) -> JobSpec:
    """Return the spec with the snapshots of the run's first leg where it names none and follows no appends."""
    first = first_leg_of(rows)
    if first is None or len(first.sources) != len(spec.sources):
        return spec
    sources = [
        source.model_copy(update={"snapshot_id": mine.snapshot_id, "ref": ""})
        if source.snapshot_id is None and source.follow != "appends" and source.table == mine.table
        else source
        for source, mine in zip(spec.sources, first.sources, strict=True)
    ]
    return spec.with_sources(sources)


def first_leg_of(rows: Sequence[typed_rows.LedgerRow]) -> Leg | None:
    """Return the first leg of a run, or None if it has none."""
    legs = [row for row in rows if isinstance(row, typed_rows.LegRow)]
    return Leg.from_record(min(legs, key=lambda row: row.seq).record) if legs else None


def planned(leg: Leg) -> dict[str, Any]:
    """Return the fields of a `ClaimRow` for the plans that its attempt reads. Their snapshots stay pinned."""
    pins = [typed_rows.PlannedSnapshot(table_uuid=one.table_uuid, snapshot_id=one.snapshot_id) for one in leg.sources]
    return {"plan_ids": [one.plan_id for one in leg.sources], "leg_plan_ids": leg.plan_ids, "planned": pins}


def _with(known: Sequence[str], source: int, exclusions: Sequence[typed_rows.Exclusion]) -> tuple[str, ...]:
    more = dict.fromkeys(each.where for each in exclusions if each.source == source)
    return (*known, *(where for where in more if where not in known))


def _is_plan_of(source: SourceSpec, row: PlanRow) -> bool:
    return (
        (row.source_table, row.row_filter) == (source.table, source.planned_filter)
        and json.loads(row.columns) == source.columns
        and json.loads(row.exclude) == source.exclude
        and source.snapshot_id in (None, row.snapshot_id)
    )


def leg_of(rows: list[typed_rows.LedgerRow], checkpoint_id: str) -> Leg:
    """Return the leg that a checkpoint ends in: the one that it, or else its nearest ancestor with a leg, names."""
    legs = {row.checkpoint_id: row.record for row in rows if isinstance(row, typed_rows.LegRow)}
    at = next((each for each in lineage_of(rows, checkpoint_id) if each in legs), None)
    if at is None:
        raise errors.LedgerError(
            f"expected the leg of checkpoint {checkpoint_id!r} in the ledger, found none: restore the table"
        )
    return Leg.from_record(legs[at])
