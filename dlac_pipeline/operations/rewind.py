"""Rewind: a new branch of a run from an earlier checkpoint, without the rows that should not be read again.

All checks precede the one append that opens the branch. They find whatever would make the branch useless: a damaged
checkpoint, a missing snapshot, a lost history of appends, or a predicate that does not fit the table.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from pyiceberg.table import Table

from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.checkpoint.files import StoreFiles
from dlac_pipeline.checkpoint.manifest import read_manifest, verify_files
from dlac_pipeline.checkpoint.store import folder_uri, tiers_of
from dlac_pipeline.lakehouse.errors import DlacError, EmptyPlan, LedgerError, SpecInvalid
from dlac_pipeline.lakehouse.filters.conditions import filter_names
from dlac_pipeline.lakehouse.history.changes import OnOverwrite, changes
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.data_files import LiveFile
from dlac_pipeline.lakehouse.iceberg.row_groups import parse_exclusion, row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.branches import Exclusion, Rewound, commit_rewind
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger, check_store
from dlac_pipeline.lakehouse.ledger.plans import get_plan
from dlac_pipeline.lakehouse.ledger.run_rows import Row, checkpoint_rows, lineage_of, restorable, restorable_rows
from dlac_pipeline.plan.legs.choice import check_sources
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.planner import check_plan
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.choose_leg import first_leg_of, leg_of, planned


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
    """Open a new branch of a run from the restorable checkpoint of a step or with an id. Step 0 is the run's beginning.

    `exclude` are filters for rows of `source` (a label, required in a mixture) that the branch leaves out. The report counts
    how many of them the checkpoint has seen already, and names the newest checkpoint that has seen none. `nonce` is the
    caller's name for this rewind: a repeated call changes nothing. `spec` is the run's job spec and names the current places.

    Raises:
        NoSuchRun: the run does not exist.
        NoSuchCheckpoint: the run keeps no such checkpoint.
        SpecInvalid, NoSuchColumn: an expression does not fit the table, or nothing would change.
        ResumeMismatch: `spec` has another number of sources than the run.
        EmptyPlan: the expressions leave no row of a source that is read in several passes.
        CheckpointDamaged: the checkpoint's files differ from those committed.
        PinLost, TableReplaced: the data that it would read next is gone.
        LedgerOlderThanStore: the catalog was restored from an older backup.
        AppendHistoryLost: rows appended after it to a followed table cannot be identified any more.
    """
    ledger = Ledger(lakehouse)
    files = _check_store_files(ledger, run, spec)
    rows = ledger.head_rows(run)
    landed = [row for row in rows if row["kind"] == "rewind" and row["nonce"] == nonce]
    if landed:
        return _report_again(ledger, rows, landed[0], spec)
    target = _target(run, rows, step, checkpoint_id)
    leg = _first_leg(run, rows) if target is None else leg_of(rows, target["checkpoint_id"])
    if spec is not None:
        check_sources(spec, leg)
    wanted = _exclusions(leg, exclude, source)
    _check_sources(lakehouse, leg, wanted, spec, begins=target is None)
    detail: dict[str, Any] = {"host": socket.gethostname()}
    if target is None:
        detail |= planned(leg)  # the next launch needs these pins, and no checkpoint names them
    else:
        _verify_checkpoint(target, files)
    target_id = None if target is None else target["checkpoint_id"]
    done = commit_rewind(ledger, run, nonce=nonce, checkpoint_id=target_id, exclude=wanted, why=why, detail=detail)
    return replace(done, **_seen_before(lakehouse, run, rows, done.checkpoint_id, wanted, (leg, spec)))


def _check_store_files(ledger: Ledger, run: str, spec: JobSpec | None) -> StoreFiles:
    """Return the files of the run's store, and check that the catalog is not older than they are."""
    if spec is None:
        check_ledger(ledger.lakehouse, run)
        return StoreFiles(ledger.lakehouse.config.properties)
    tiers = tiers_of(spec)
    check_store(ledger, run, tiers.durable_run(), tiers.files)
    return tiers.files


def _verify_checkpoint(row: Row, files: StoreFiles) -> None:
    manifest = read_manifest(row["manifest_uri"], row["manifest_digest"], files)
    verify_files(manifest, folder_uri(row["manifest_uri"]), files)


def _report_again(ledger: Ledger, rows: list[Row], landed: Row, spec: JobSpec | None) -> Rewound:
    """Report a rewind that was committed before."""
    run = landed["run"]
    done = commit_rewind(ledger, run, nonce=landed["nonce"], checkpoint_id=None, detail={})
    wanted = tuple(Exclusion(**each) for each in json.loads(landed["detail"])["exclude"])
    leg = _first_leg(run, rows) if done.checkpoint_id is None else leg_of(rows, done.checkpoint_id)
    return replace(done, **_seen_before(ledger.lakehouse, run, rows, done.checkpoint_id, wanted, (leg, spec)))


def _target(run: str, rows: list[Row], step: int | None, checkpoint_id: str | None) -> Row | None:
    """Return the row of the checkpoint to go back to, or None for the beginning of a run that began without one."""
    if step == 0 and checkpoint_id is None:
        first = _first_checkpoint(rows)
        if first is None:
            raise SpecInvalid(
                f"expected a checkpoint of run {run!r}, found none: it is at its beginning, nothing to rewind"
            )
        if int(first["step"]) > 0:
            return None
        checkpoint_id = first["checkpoint_id"]  # an adopted or forked run cannot begin without that state
    return restorable(run, rows, step, checkpoint_id=checkpoint_id)


def _first_checkpoint(rows: Sequence[Row]) -> Row | None:
    """Return the row of the first checkpoint of a run. Its step is 0 if the run was adopted or forked."""
    return min(checkpoint_rows(rows).values(), key=lambda row: int(row["seq"]), default=None)


def _first_leg(run: str, rows: Sequence[Row]) -> Leg:
    first = first_leg_of(rows)
    if first is None:
        raise LedgerError(f"expected the first leg of run {run!r} in the ledger, found none: restore the table")
    return first


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


def _check_sources(
    lakehouse: Lakehouse, leg: Leg, wanted: Sequence[Exclusion], spec: JobSpec | None, *, begins: bool
) -> None:
    for index, (mine, name) in enumerate(zip(leg.sources, _table_names(leg, spec), strict=True)):
        table = lakehouse.load(name)
        for plan_id in mine.start.plan_ids:
            check_plan(lakehouse, plan_id, table=name)
        if mine.follow == "appends":
            _check_history(table, mine, "read" if spec is None else spec.sources[index].on_overwrite)
        where = [each.where for each in wanted if each.source == index]
        for each in where:
            _check_fits(table, mine, each)
        if where:
            _check_leaves_some(lakehouse, table, mine, where, begins=begins, alone=len(leg.sources) == 1)


def _table_names(leg: Leg, spec: JobSpec | None) -> list[str]:
    """Return the current name of the table of each source."""
    return [source.table for source in (leg.sources if spec is None else spec.sources)]


def _check_history(table: Table, mine: LegSource, on_overwrite: OnOverwrite) -> None:
    """Check that the branch can resume with the appended rows. Without a spec, an overwrite counts as new rows."""
    until = snapshot_of(table, None).snapshot_id
    if until != mine.snapshot_id:
        known = changes(
            table, mine.snapshot_id, until, on_overwrite=on_overwrite, identity_columns=mine.identity_columns
        )
        known.check()


def _check_fits(table: Table, mine: LegSource, where: str) -> None:
    schema = table.schemas()[mine.schema_id]
    try:
        parse_exclusion(where, schema, table)
    except SpecInvalid as err:
        raise SpecInvalid(f"{err}; columns of {mine.name!r} are {filter_names(schema)!r}") from err


def _check_leaves_some(
    lakehouse: Lakehouse, table: Table, mine: LegSource, where: Sequence[str], *, begins: bool, alone: bool
) -> None:
    """Check that the exclusions leave rows in each plan that is read without end, or in each plan if the branch `begins`.

    A run's only source (`alone`) must keep a row in one of its plans, unless the source follows appends. Another source with
    an end may be left out of a mixture as a whole.
    """
    leaves = {plan_id: _leaves_some(lakehouse, table, mine, plan_id, where) for plan_id in mine.start.live_plan_ids}
    empty = [plan_id for plan_id, passes in mine.start.upcoming if (begins or passes == 0) and not leaves[plan_id]]
    read_more = mine.follow == "appends"  # later appends bring rows
    if empty or (alone and not read_more and leaves and not any(leaves.values())):
        again = ", which is read again and again (passes = 0)" if empty and not begins else ""
        raise EmptyPlan(
            f"expected live rows in {mine.name!r}{again}, found that {list(where)!r} leaves none: exclude fewer rows"
        )


def _leaves_some(lakehouse: Lakehouse, table: Table, mine: LegSource, plan_id: str, where: Sequence[str]) -> bool:
    plan = get_plan(lakehouse, plan_id)
    groups = row_groups_of(
        table,
        plan.snapshot_id,
        plan.row_filter,
        schema=table.schemas()[plan.schema_id],
        exclude=[*mine.exclude, *where],
    )
    return any(len(group.dead) < group.rows for group in groups)


def _seen_before(
    lakehouse: Lakehouse,
    run: str,
    rows: Sequence[Row],
    target: str | None,
    wanted: Sequence[Exclusion],
    of: tuple[Leg, JobSpec | None],
) -> dict[str, Any]:
    """Return the report on excluded rows: how many the target has seen, and the newest checkpoint that has seen none.

    `of` is the target's leg, with the run's spec.
    """
    if not wanted:
        return {}
    if target is None:
        return {"excluded_rows_seen": 0}
    try:
        seen = _seen_rows(lakehouse, run, target, wanted, [lakehouse.load(name) for name in _table_names(*of)])
    except (DlacError, duckdb.Error) as err:  # the snapshot of an old plan may have expired
        return {"not_counted": f"{type(err).__name__}: {err}"}
    count = len({(source, path, row) for source, path, row, _ in seen})
    if not count:
        return {"excluded_rows_seen": 0}
    clean = _newest_before(rows, target, {checkpoint for *_, checkpoint in seen})
    if clean is not None:
        clean_step = int(checkpoint_rows(rows)[clean]["step"])
        return {"excluded_rows_seen": count, "clean_checkpoint": clean, "clean_step": clean_step}
    first = _first_checkpoint(rows)
    has_beginning = first is not None and int(first["step"]) > 0
    return {"excluded_rows_seen": count, "clean_step": 0 if has_beginning else None}


def _newest_before(rows: Sequence[Row], target: str, seen_by: Collection[str]) -> str | None:
    """Return the newest restorable checkpoint that is older than all of `seen_by`.

    Return None if no such checkpoint exists, or if one of `seen_by` belongs to another run.
    """
    places = {name: place for place, name in enumerate(lineage_of(rows, target))}
    if not places.keys() >= set(seen_by):
        return None
    oldest, kept = max(places[name] for name in seen_by), restorable_rows(rows)
    return next((name for name, place in places.items() if place > oldest and name in kept), None)


_SeenRow = tuple[int, str, int, str]
"""Source, data file, position in the file, and the checkpoint that was trained on the row."""


def _seen_rows(
    lakehouse: Lakehouse, run: str, target: str, wanted: Sequence[Exclusion], tables: Sequence[Table]
) -> list[_SeenRow]:
    """Return the excluded rows that a checkpoint was trained on, also in the runs that its run was forked from."""
    found: list[_SeenRow] = []
    for source in sorted({each.source for each in wanted}):
        table = tables[source]
        where = [each.where for each in wanted if each.source == source]
        at: tuple[str, str] | None = (run, target)
        while at is not None:
            with open_audit(lakehouse, run=at[0]) as connection:
                own = source if at[0] == run else None
                excluded = _excluded_rows(connection, at[1], table, where, own)
                connection.register("excluded_rows", excluded)
                seen = rows_of(connection, "FROM rows_seen('excluded_rows', $1)", [at[1]])
                found += [
                    (source, each["file_path"], each["row"], each["checkpoint_id"])
                    for each in seen
                    if own is None or each["source"] == own
                ]
                at = _forked_from(connection, at[1])
    return found


def _excluded_rows(
    connection: duckdb.DuckDBPyConnection, checkpoint: str, table: Table, where: Sequence[str], source: int | None
) -> pa.Table:
    """Return the rows (plan_id, file_path, row) that the expressions match, of a table's plans that led to a checkpoint."""
    plans = rows_of(
        connection,
        "SELECT DISTINCT p.plan_id, p.snapshot_id, p.schema_id FROM consumption AS a JOIN plans AS p USING (plan_id) "
        "WHERE a.kind = 'advance' AND p.table_uuid = $1 AND ($2 IS NULL OR a.source = $2) "
        "AND a.checkpoint_id IN (SELECT checkpoint_id FROM ancestors($3))",
        [str(table.metadata.table_uuid), source, checkpoint],
    )
    parts = [pa.table({"plan_id": pa.array([], pa.string()), "file_path": pa.array([], pa.string()), "row": _NO_ROWS})]
    for plan in plans:
        asked = "SELECT DISTINCT file_path FROM units WHERE plan_id = $1"
        paths = {each["file_path"] for each in rows_of(connection, asked, [plan["plan_id"]])}
        groups = row_groups_of(
            table,
            plan["snapshot_id"],
            "",
            schema=table.schemas()[plan["schema_id"]],
            only=_is_one_of(paths),
            exclude=where,
        )
        for group in groups:
            positions = group.first_row + group.dead
            same = {"plan_id": plan["plan_id"], "file_path": group.file_path}
            parts.append(
                pa.table({**{name: pa.repeat(value, len(positions)) for name, value in same.items()}, "row": positions})
            )
    return pa.concat_tables(parts)


_NO_ROWS = np.zeros(0, dtype=np.int64)


def _is_one_of(paths: Collection[str]) -> Callable[[LiveFile], bool]:
    return lambda file: file.path in paths


def _forked_from(connection: duckdb.DuckDBPyConnection, checkpoint: str) -> tuple[str, str] | None:
    """Return the run and the checkpoint that a checkpoint's run was forked from, or None."""
    found = rows_of(
        connection,
        "SELECT forked_run, forked_from FROM checkpoints WHERE forked_from IS NOT NULL "
        "AND checkpoint_id IN (SELECT checkpoint_id FROM ancestors($1))",
        [checkpoint],
    )
    return (found[0]["forked_run"], found[0]["forked_from"]) if found else None
