"""The cause of an attempt's failure when a row group did not decode: damage, or an unavailable store."""

from dataclasses import dataclass

from dlac_pipeline.lakehouse.errors import DataFileUnreadable
from dlac_pipeline.plan.legs.leg import Leg, Unreadable
from dlac_pipeline.plan.plan import Plan, Plans
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.spec.job_spec import JobSpec

_WITNESSES = 8
"""Other data files of the plan that are tried. One readable file shows that the store is available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A damaged row group, and the job spec's policy for it."""

    unreadable: Unreadable
    policy: str


def damaged_row_group(plans: Plans, spec: JobSpec, leg: Leg, path: str, row_group: int) -> Damaged | None:
    """Return the damaged row group of a leg on which an attempt failed. None if it decodes now, or if nothing can be read."""
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        for plan_id in mine.start.live_plan_ids:
            plan = plans.load(plan_id, table=source.table)
            places = plan.units.places()
            if (path, row_group) not in places:
                continue
            unit = places.index((path, row_group))
            decoder = open_decoder(plans.lakehouse.load(source.table), mine, [plan.row.snapshot_id])
            reason = _problem(decoder, plan, unit)
            if reason is None or not _store_answers(decoder, plan, path):
                return None
            return Damaged(
                unreadable=Unreadable(path=path, row_group=row_group, reason=reason), policy=source.on_unreadable
            )
    return None


def _problem(decoder: BlockDecoder, plan: Plan, unit: int) -> str | None:
    """Return why a unit does not decode, or None if it decodes."""
    try:
        decoder.row_group(*plan.units.place(unit), int(plan.units.rows[unit]))
    except DataFileUnreadable as err:
        return str(err)
    return None


def _store_answers(decoder: BlockDecoder, plan: Plan, path: str) -> bool:
    """Return True if another data file can be read, or if the plan has only one file, whose damage is then believed."""
    first_units = {
        plan.units.file_paths[file]: unit for unit, file in reversed(list(enumerate(plan.units.file.tolist())))
    }
    first_units.pop(path, None)
    others = list(first_units.values())[:_WITNESSES]
    return not others or any(_problem(decoder, plan, unit) is None for unit in others)
