"""Resolve the leg that a launch trains: the committed one, its successor, or the first of a new run. Nothing is claimed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dlac_pipeline.checkpoint.manifest import Manifest
from dlac_pipeline.checkpoint.restore.verified_copy import manifest_of
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.branches import exclusions_in_force, starts_over
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, way_out
from dlac_pipeline.plan.legs.choice import check_same_tables, check_sources, first_leg, plan_sources, requested_leg
from dlac_pipeline.plan.legs.committed_leg import first_leg_of, leg_of, replays_of
from dlac_pipeline.plan.legs.leg import Leg, describe_differences
from dlac_pipeline.plan.legs.next_leg import LegRequest, leaving_out, next_leg
from dlac_pipeline.plan.order import reader_state_of
from dlac_pipeline.plan.plan import Plans, is_plan_of
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.request import ResumeOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The leg of an attempt, and the head for which it was resolved."""

    leg: Leg
    head: str | None
    """Id of the checkpoint. None: the beginning of the run."""
    damage: str = ""
    """Damage of the head's manifest, or empty. A restore finds it again and handles it."""
    is_sure: bool = True
    """False: the manifest is damaged, and no leg in memory continues it. The leg of the head was not checked."""

    def is_for(self, head: str | None) -> bool:
        """Return True if an attempt that resumes at this checkpoint trains this leg."""
        return self.is_sure and self.head == head


class Resolver:
    """Choice of the leg of an attempt. It claims nothing.

    A recovery whose leg is unchanged resolves from the ledger. It reads the source tables in `check_tables` only.
    """

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
        self._repin = options.repin and (not spec.streams or bool(options.unreadable))
        """True to continue with the rows that were appended since. A run that streams does so at the end of its leg, unless the
        leg that follows has rows to leave out."""
        follows = self._repin and any(source.follows for source in spec.sources)
        asks = follows or options.unreadable or options.plans or spec.launch.new_leg
        self.defers_tables = recovering and not asks
        """True if `check_tables` is left to the caller, once the state is restored."""
        if options.plans and len(options.plans) != len(spec.sources):
            raise errors.SpecInvalid(
                f"expected a plan for each of the {len(spec.sources)} sources of run {spec.run!r}, found {len(options.plans)}: "
                "name them in the order of the sources, or none"
            )

    def resolve(self, head: str | None, in_memory: Callable[[], Iterable[Leg]]) -> Resolved:
        """Return the leg for a head, as far as the ledger and the head's manifest show it. Raises as `check`.

        `in_memory` returns the legs of states in memory, the newest first. If the head's manifest is damaged, one of these is
        taken that the spec requests, and that the head ends in or is followed by. A run that streams continues the leg that
        follows its head, too: it was entered in place.
        """
        rows = self.ledger.rows(self._spec.run, kinds=typed_rows.HEAD_KINDS)
        row = checkpoint_rows(rows).get(head or "")
        if row is None:
            return self.resolve_at(rows, None)
        try:
            manifest = manifest_of(row, tiers_of(self._spec))
        except errors.CheckpointDamaged as err:
            committed = leg_of(rows, row.checkpoint_id)
            found = (leg for leg in in_memory() if leg.index in (committed.index, committed.index + 1))
            leg = next((each for each in found if self._continues(each, rows)), None)
            return Resolved(leg=leg or committed, head=head, damage=str(err), is_sure=leg is not None)
        resolved = self.resolve_at(rows, manifest)
        entered = (
            (leg for leg in in_memory() if _follows(resolved.leg, leg, manifest.step)) if self._spec.streams else ()
        )
        leg = next((each for each in entered if self._continues(each, rows)), None)
        return resolved if leg is None else replace(resolved, leg=leg)

    def _continues(self, leg: Leg, rows: Sequence[typed_rows.LedgerRow]) -> bool:
        """Return whether the launch requests this leg, and its plans can be read."""
        try:
            requested = self.check(leg, rows)
            self.check_tables(leg)
        except (errors.ResumeMismatch, errors.LakehouseError):
            return False
        return requested.bound() == leg.bound() and not self._options.unreadable

    def resolve_at(self, rows: list[typed_rows.LedgerRow], manifest: Manifest | None) -> Resolved:
        """Return the leg of an attempt that resumes at this checkpoint. Raises as `check`."""
        if manifest is None:
            return Resolved(leg=self._first(rows), head=None)
        leg = leg_of(rows, manifest.checkpoint_id)
        requested = self.check(leg, rows)
        # Exclusions of a rewind need a new leg, although no launch requests one.
        if not self.defers_tables or requested.bound() != leg.bound():
            self.check_tables(leg)
            spec = excluding(self._spec, exclusions_in_force(rows))
            repin = self._repin
            if self._has_replays(leg, rows, manifest):
                self._check_finishes(leg, requested)
                repin = False
            request = LegRequest(requested=requested, repin=repin, unreadable=self._options.unreadable)
            state = reader_state_of(manifest.reader_state)
            leg = next_leg(self._plans, spec, leg, request, step=manifest.step, state=state)
        return Resolved(leg=leg, head=manifest.checkpoint_id)

    def _has_replays(self, leg: Leg, rows: list[typed_rows.LedgerRow], manifest: Manifest) -> bool:
        """Return True if rows of skipped steps are to be read again in the leg, which must end first."""
        if self._spec.launch.on_skipped == "count":
            return False
        order = leg.order({each: self._plans.read(each).units for each in leg.plan_ids})
        replays = replays_of(leg, order, self.ledger, rows, manifest.checkpoint_id)
        return replays is not None and bool(replays.skipped) and replays.total_steps > manifest.step

    def _check_finishes(self, leg: Leg, requested: Leg) -> None:
        """Raise `ResumeMismatch` if a leg with replays to come is to change. Exclusions end it."""
        changed = {name: both for name, both in leg.differences(requested).items() if not name.endswith("exclude")}
        if changed:
            raise errors.ResumeMismatch(
                f"expected leg {leg.index} until the rows of its skipped steps are read again, found changes:\n"
                f"{describe_differences(changed)}\n"
                'give the committed values until then, or set launch.on_skipped = "count"'
            )

    def check_tables(self, leg: Leg) -> None:
        """Check the tables of a leg, the pins of its plans, and files that no pin protects. Raises as `Plans.check_files`."""
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
        uuids = self._table_uuids(leg)
        check_same_tables(leg, uuids)
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

    def _table_uuids(self, leg: Leg) -> dict[str, str]:
        """Return the uuid of each table of the spec. If the tables are checked later, the leg knows an unchanged table's uuid."""
        known = {mine.table: mine.table_uuid for mine in leg.sources} if self.defers_tables else {}
        uuids = {}
        for table in (source.table for source in self._spec.sources):
            try:
                uuids[table] = known.get(table) or str(self._lakehouse.load(table).metadata.table_uuid)
            except errors.NoSuchTable:
                if table not in {
                    mine.table for mine in leg.sources
                }:  # else it is reported where the leg needs the table
                    raise
        return uuids

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
        read = self._plans.read if self.defers_tables else self._plans.load
        plans = [read(plan_id) for plan_id in known] or [
            self._plans.add(plan) for plan in plan_sources(self._lakehouse, spec)
        ]
        return leaving_out(self._plans, spec, first_leg(spec, plans), self._options.unreadable)

    def _claimed_plans(self, rows: list[typed_rows.LedgerRow]) -> tuple[str, ...]:
        """Return the plans that the attempt to be recovered had claimed, if the spec still requests them."""
        claims = [row for row in rows if isinstance(row, typed_rows.ClaimRow)]
        plan_ids = claims[-1].plan_ids if claims else ()
        found = [self._plans.find_row(plan_id) for plan_id in plan_ids]
        fits = len(found) == len(self._spec.sources) and all(
            row is not None and is_plan_of(source, row) for source, row in zip(self._spec.sources, found, strict=True)
        )
        return tuple(plan_ids) if fits else ()


def _follows(leg: Leg, later: Leg, step: int) -> bool:
    """Return whether a leg begins where another one has ended, after a step."""
    return later.index == leg.index + 1 and later.start_step == step


def excluding(spec: JobSpec, exclusions: Sequence[typed_rows.Exclusion]) -> JobSpec:
    """Return the spec with the exclusions of rewinds after the spec's exclusions, without repeats."""
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
        source.model_copy(update={"version": mine.snapshot_id})
        if source.snapshot_id is None and not source.follows and source.table == mine.table
        else source
        for source, mine in zip(spec.sources, first.sources, strict=True)
    ]
    return spec.with_sources(sources)


def _with(known: Sequence[str], source: int, exclusions: Sequence[typed_rows.Exclusion]) -> tuple[str, ...]:
    more = dict.fromkeys(each.where for each in exclusions if each.source == source)
    return (*known, *(where for where in more if where not in known))
