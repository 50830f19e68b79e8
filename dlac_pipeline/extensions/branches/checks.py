"""Sources of a new branch: checks of plans, appends and exclusions, and the excluded rows that were trained on before."""

from collections.abc import Collection, Sequence
from typing import Any

import duckdb
import pyarrow as pa
from pyiceberg.table import Table

from dlac_pipeline.audit.lakehouse_sql import NO_PLACES, excluded_places, open_audit, rows_of, sql_script
from dlac_pipeline.checkpoint.manifest import read_manifest, verify_files
from dlac_pipeline.checkpoint.store import folder_uri
from dlac_pipeline.lakehouse.errors import DlacError, EmptyPlan, SpecInvalid
from dlac_pipeline.lakehouse.filters.grammar import filter_names
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.row_groups import parse_exclusion, row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of, restorable_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, Exclusion, LedgerRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.plan.legs.changes import OnOverwrite, history_of
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec

_SEEN = "SELECT $1, file_path, row, checkpoint_id FROM rows_seen('excluded_rows', $2) WHERE run <> $3 OR source = $1"
_SeenRow = tuple[int, str, int, str]
"""Source, data file, position in the file, and the checkpoint that was trained on the row."""


def check_branch(plans: Plans, leg: Leg, wanted: Sequence[Exclusion], spec: JobSpec | None, *, begins: bool) -> None:
    """Check that a branch can read the sources of its leg without the rows of `wanted`.

    Raises:
        PinLost, TableReplaced: the data that it would read next is gone.
        AppendHistoryLost: appended rows of a followed table cannot be identified any more.
        SpecInvalid, NoSuchColumn: an expression does not fit the table.
        EmptyPlan: the expressions leave no row of a source that is read in several passes.
    """
    for index, (mine, table) in enumerate(zip(leg.sources, _tables_of(plans.lakehouse, leg, spec), strict=True)):
        name = (leg if spec is None else spec).sources[index].table
        for plan_id in mine.start.plan_ids:
            plans.check(plan_id, table=name)
        if mine.follow == "appends":
            until, columns = snapshot_of(table, None).snapshot_id, mine.identity_columns
            # Without a spec, an overwrite counts as new rows.
            on_overwrite: OnOverwrite = "read" if spec is None else spec.sources[index].on_overwrite
            if until != mine.snapshot_id:
                history = history_of(name)
                history(table, mine.snapshot_id, until, on_overwrite=on_overwrite, identity_columns=columns).check()
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


def _tables_of(lakehouse: Lakehouse, leg: Leg, spec: JobSpec | None) -> list[Table]:
    """Return the table of each source, by its current name."""
    names = [source.table for source in (leg.sources if spec is None else spec.sources)]
    return [lakehouse.load(name) for name in names]


def _check_leaves_some(
    plans: Plans, table: Table, mine: LegSource, where: Sequence[str], *, begins: bool, alone: bool
) -> None:
    """Check that the exclusions leave rows in each plan that is read without end, or in each plan if the branch `begins`.

    A run's only source (`alone`) must keep a row, unless it follows appends. Another one with an end may be left out.
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
    plan, exclude = plans.row(plan_id), [*mine.exclude, *where]
    schema = table.schemas()[plan.schema_id]
    groups = row_groups_of(table, plan.snapshot_id, plan.row_filter, schema=schema, exclude=exclude)
    return any(len(group.dead) < group.rows for group in groups)


def first_checkpoint(rows: Sequence[LedgerRow]) -> CheckpointRow | None:
    """Return the row of the first checkpoint of a run. Its step is 0 if the run was adopted or forked."""
    return min(checkpoint_rows(rows).values(), key=lambda row: row.seq, default=None)


def seen_before(
    lakehouse: Lakehouse,
    run: str,
    rows: Sequence[LedgerRow],
    target: str | None,
    wanted: Sequence[Exclusion],
    of: tuple[Leg, JobSpec | None],
) -> dict[str, Any]:
    """Return how many excluded rows the target has seen, and the newest checkpoint without them. `of`: its leg, the spec."""
    if not wanted:
        return {}
    if target is None:
        return {"excluded_rows_seen": 0}
    try:
        seen = _seen_rows(lakehouse, run, target, wanted, _tables_of(lakehouse, *of))
    except (DlacError, duckdb.Error) as err:  # the snapshot of an old plan may have expired
        return {"not_counted": f"{type(err).__name__}: {err}"}
    count = len({(source, path, row) for source, path, row, _ in seen})
    if not count:
        return {"excluded_rows_seen": 0}
    clean = newest_before(rows, target, {checkpoint for *_, checkpoint in seen})
    if clean is not None:
        clean_step = checkpoint_rows(rows)[clean].step
        return {"excluded_rows_seen": count, "clean_checkpoint": clean, "clean_step": clean_step}
    first = first_checkpoint(rows)
    has_beginning = first is not None and first.step > 0
    return {"excluded_rows_seen": count, "clean_step": 0 if has_beginning else None}


def newest_before(rows: Sequence[LedgerRow], target: str, seen_by: Collection[str]) -> str | None:
    """Return the newest restorable checkpoint that is older than all of `seen_by`. None, also if one is of another run."""
    places = {name: place for place, name in enumerate(lineage_of(rows, target))}
    if not places.keys() >= set(seen_by):
        return None
    oldest, kept = max(places[name] for name in seen_by), restorable_rows(rows)
    return next((name for name, place in places.items() if place > oldest and name in kept), None)


def _seen_rows(
    lakehouse: Lakehouse, run: str, target: str, wanted: Sequence[Exclusion], tables: Sequence[Table]
) -> list[_SeenRow]:
    """Return the excluded rows that a checkpoint was trained on, also in the runs that its run was forked from."""
    found: list[_SeenRow] = []
    script = sql_script("planned_snapshots")
    with open_audit(lakehouse, query="rows_seen plans") as connection:
        for source in sorted({each.source for each in wanted}):
            where = [each.where for each in wanted if each.source == source]
            plans = rows_of(connection, script, [str(tables[source].metadata.table_uuid), target])
            places = [excluded_places(connection, tables[source], where, plan) for plan in plans]
            connection.register("excluded_rows", pa.concat_tables([NO_PLACES, *places]))
            found += connection.execute(_SEEN, [source, target, run]).fetchall()
    return found
