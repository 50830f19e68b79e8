"""Checks of the sources of a new branch: their plans, their history of appends, and the rows that exclusions leave."""

from collections.abc import Sequence

from pyiceberg.table import Table

from dlac_pipeline.checkpoint.manifest import read_manifest, verify_files
from dlac_pipeline.checkpoint.store import folder_uri
from dlac_pipeline.lakehouse.errors import EmptyPlan, SpecInvalid
from dlac_pipeline.lakehouse.filters.grammar import filter_names
from dlac_pipeline.lakehouse.history.changes import OnOverwrite, changes
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.row_groups import parse_exclusion, row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, Exclusion
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec


def check_branch(plans: Plans, leg: Leg, wanted: Sequence[Exclusion], spec: JobSpec | None, *, begins: bool) -> None:
    """Check that a branch can read the sources of its leg without the rows of `wanted`.

    Raises:
        PinLost, TableReplaced: the data that it would read next is gone.
        AppendHistoryLost: appended rows of a followed table cannot be identified any more.
        SpecInvalid, NoSuchColumn: an expression does not fit the table.
        EmptyPlan: the expressions leave no row of a source that is read in several passes.
    """
    for index, (mine, table) in enumerate(zip(leg.sources, tables_of(plans.lakehouse, leg, spec), strict=True)):
        for plan_id in mine.start.plan_ids:
            plans.check(plan_id, table=(leg if spec is None else spec).sources[index].table)
        if mine.follow == "appends":
            _check_history(table, mine, "read" if spec is None else spec.sources[index].on_overwrite)
        where = [each.where for each in wanted if each.source == index]
        for each in where:
            schema = table.schemas()[mine.schema_id]
            try:
                parse_exclusion(each, schema, table)
            except SpecInvalid as err:
                raise SpecInvalid(f"{err}; columns of {mine.name!r} are {filter_names(schema)!r}") from err
        if where:
            _check_leaves_some(plans, table, mine, where, begins=begins, alone=len(leg.sources) == 1)


def check_files(row: CheckpointRow, files: StoreFiles) -> None:
    """Check all digests of a checkpoint that a branch begins with. Raise `CheckpointDamaged` if one differs."""
    manifest = read_manifest(row.manifest_uri, row.manifest_digest, files)
    verify_files(manifest, folder_uri(row.manifest_uri), files)


def tables_of(lakehouse: Lakehouse, leg: Leg, spec: JobSpec | None) -> list[Table]:
    """Return the table of each source, by its current name."""
    names = [source.table for source in (leg.sources if spec is None else spec.sources)]
    return [lakehouse.load(name) for name in names]


def _check_history(table: Table, mine: LegSource, on_overwrite: OnOverwrite) -> None:
    """Check that the branch can resume with the appended rows. Without a spec, an overwrite counts as new rows."""
    until = snapshot_of(table, None).snapshot_id
    if until != mine.snapshot_id:
        known = changes(
            table, mine.snapshot_id, until, on_overwrite=on_overwrite, identity_columns=mine.identity_columns
        )
        known.check()


def _check_leaves_some(
    plans: Plans, table: Table, mine: LegSource, where: Sequence[str], *, begins: bool, alone: bool
) -> None:
    """Check that the exclusions leave rows in each plan that is read without end, or in each plan if the branch `begins`.

    A run's only source (`alone`) must keep a row in one of its plans, unless the source follows appends. Another source with
    an end may be left out of a mixture as a whole.
    """
    leaves = {plan_id: _leaves_some(plans, table, mine, plan_id, where) for plan_id in mine.start.live_plan_ids}
    empty = [plan_id for plan_id, passes in mine.start.upcoming if (begins or passes == 0) and not leaves[plan_id]]
    read_more = mine.follow == "appends"  # later appends bring rows
    if empty or (alone and not read_more and leaves and not any(leaves.values())):
        again = ", which is read again and again (passes = 0)" if empty and not begins else ""
        raise EmptyPlan(
            f"expected live rows in {mine.name!r}{again}, found that {list(where)!r} leaves none: exclude fewer rows"
        )


def _leaves_some(plans: Plans, table: Table, mine: LegSource, plan_id: str, where: Sequence[str]) -> bool:
    plan = plans.row(plan_id)
    groups = row_groups_of(
        table,
        plan.snapshot_id,
        plan.row_filter,
        schema=table.schemas()[plan.schema_id],
        exclude=[*mine.exclude, *where],
    )
    return any(len(group.dead) < group.rows for group in groups)
