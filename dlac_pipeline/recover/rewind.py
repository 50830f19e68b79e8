"""Going back: a run's new branch from an earlier checkpoint, with rows left out that should not be read again.

Everything that could make the branch useless is found out before anything is written: a damaged checkpoint, a snapshot that
is gone, a history of appends that is lost, a predicate that does not fit the table. Then one append decides.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from pyiceberg.table import Table

from catalog.branches import Exclusion, Rewound, rewind
from catalog.connect import Lakehouse
from catalog.errors import EmptyPlan, SpecInvalid
from catalog.history import OnOverwrite, changes
from catalog.ledger import Ledger
from catalog.plans import get_plan
from catalog.row_groups import parse_exclusion, row_groups_of
from catalog.snapshots import snapshot_of
from dlac_pipeline.checkpoint.files import StoreFiles
from dlac_pipeline.checkpoint.manifest import read_manifest, verify_files
from dlac_pipeline.checkpoint.store import folder_uri, tiers_of
from dlac_pipeline.plan.leg import Leg, LegSource
from dlac_pipeline.plan.legs import check_sources
from dlac_pipeline.plan.planner import check_plan
from dlac_pipeline.recover.leg_choice import leg_of
from dlac_pipeline.spec import JobSpec


def rewind_run(
    lakehouse: Lakehouse,
    run: str,
    *,
    nonce: str,
    step: int | None = None,
    checkpoint_id: str | None = None,
    exclude: Sequence[str] = (),
    source: str | None = None,
    why: str = "",
    spec: JobSpec | None = None,
) -> Rewound:
    """Open a new branch of a run from the restorable checkpoint of a step, or with an id.

    `exclude` are Iceberg expressions for rows of `source` (a label; needed in a mixture) that the branch leaves out. `nonce`
    is the caller's name for this rewind: repeating it changes nothing. `spec`, the run's, says where things are now.

    Raises:
        NoSuchRun: there is no such run, or no such checkpoint that is kept.
        SpecInvalid, NoSuchColumn: an expression does not fit the table, or nothing would change.
        ResumeMismatch: `spec` has another number of sources than the run.
        EmptyPlan: the expressions leave nothing of a source that is read again and again.
        CheckpointDamaged: the checkpoint is not what was committed.
        PinLost, TableReplaced: what it would read next is gone.
        AppendHistoryLost: what was appended behind it to a followed table cannot be told apart any more.
    """
    ledger = Ledger(lakehouse)
    rows = ledger.head_rows(run)
    if any(row["kind"] == "rewind" and row["nonce"] == nonce for row in rows):
        return rewind(ledger, run, nonce=nonce, checkpoint_id="", detail={})  # it has landed
    target = ledger.restorable(run, step, checkpoint_id=checkpoint_id)
    leg = leg_of(rows, target["checkpoint_id"])
    if spec is not None:
        check_sources(spec, leg)
    wanted = _exclusions(leg, exclude, source)
    _check_sources(lakehouse, leg, wanted, spec)
    files = StoreFiles(lakehouse.config.properties) if spec is None else tiers_of(spec).files
    manifest = read_manifest(target["manifest_uri"], target["manifest_digest"], files)
    verify_files(manifest, folder_uri(target["manifest_uri"]), files)
    return rewind(
        ledger,
        run,
        nonce=nonce,
        checkpoint_id=target["checkpoint_id"],
        exclude=wanted,
        why=why,
        detail={"host": socket.gethostname()},
    )


def _exclusions(leg: Leg, exclude: Sequence[str], source: str | None) -> tuple[Exclusion, ...]:
    labels = [each.name for each in leg.sources]
    if not exclude:
        return ()
    if source is None and len(labels) > 1:
        raise SpecInvalid(
            f"expected the source whose rows are to be excluded, found none named: --source one of {labels!r}"
        )
    if source is not None and source not in labels:
        raise SpecInvalid(f"expected one of the sources {labels!r}, found {source!r}")
    return tuple(Exclusion(source=labels.index(source) if source else 0, where=where) for where in exclude)


def _check_sources(lakehouse: Lakehouse, leg: Leg, wanted: Sequence[Exclusion], spec: JobSpec | None) -> None:
    for index, mine in enumerate(leg.sources):
        table = lakehouse.load(mine.table if spec is None else spec.sources[index].table)
        for plan_id in mine.start.plan_ids:
            check_plan(lakehouse, plan_id, table=".".join(table.name()))
        if mine.follow == "appends":
            _check_history(table, mine, "read" if spec is None else spec.sources[index].on_overwrite)
        where = [each.where for each in wanted if each.source == index]
        for each in where:
            _check_fits(table, mine, each)
        if where:
            _check_leaves_some(lakehouse, table, mine, where)


def _check_history(table: Table, mine: LegSource, on_overwrite: OnOverwrite) -> None:
    """Check that the branch can go on to what was appended; where no spec says what an overwrite is, one is read."""
    until = snapshot_of(table, None).snapshot_id
    if until != mine.snapshot_id:
        known = changes(
            table, mine.snapshot_id, until, on_overwrite=on_overwrite, identity_columns=mine.identity_columns
        )
        known.check()


def _check_fits(table: Table, mine: LegSource, where: str) -> None:
    schema = table.schemas()[mine.schema_id]
    if not where.strip():
        raise SpecInvalid(
            f'expected rows to exclude, such as "length > 10", found {where!r}; columns are {schema.column_names!r}'
        )
    try:
        parse_exclusion(where, schema, table)
    except SpecInvalid as err:
        raise SpecInvalid(f"{err}; columns of {mine.name!r} are {schema.column_names!r}") from err


def _check_leaves_some(lakehouse: Lakehouse, table: Table, mine: LegSource, where: Sequence[str]) -> None:
    """Check that a source without an end has rows left; one that ends may well be left out as a whole."""
    for plan_id in [plan_id for plan_id, passes in mine.start.upcoming if passes == 0]:
        plan = get_plan(lakehouse, plan_id)
        groups = row_groups_of(
            table,
            plan.snapshot_id,
            plan.row_filter,
            schema=table.schemas()[plan.schema_id],
            exclude=[*mine.exclude, *where],
        )
        if all(len(group.dead) == group.rows for group in groups):
            raise EmptyPlan(
                f"expected live rows in {mine.name!r}, which is read again and again (passes = 0), found that {list(where)!r} "
                "leaves none: exclude fewer rows"
            )
