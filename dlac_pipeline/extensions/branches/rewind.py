"""Rewind: a new branch of a run from an earlier checkpoint, without the rows that should not be read again.

All checks precede the one append that opens the branch. They find whatever would make the branch useless: a damaged
checkpoint, a missing snapshot, a lost history of appends, or a predicate that does not fit the table.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.branches.appends import Rewound, commit_rewind
from dlac_pipeline.extensions.branches.checks import check_branch, check_files, first_checkpoint, seen_before
from dlac_pipeline.lakehouse.errors import LedgerError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger, check_store
from dlac_pipeline.lakehouse.ledger.run_rows import restorable
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, Exclusion, LedgerRow, RewindRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.plan.legs.choice import check_sources
from dlac_pipeline.plan.legs.committed_leg import first_leg_of, leg_of, planned
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.run_events import WENT_BACK, report_command


def rewind_run(
    lakehouse: Lakehouse,
    run: str,
    *,
    nonce: str,
    target: int | str,
    exclude: Sequence[str | tuple[str, str] | Exclusion] = (),
    why: str = "",
    spec: JobSpec | None = None,
) -> Rewound:
    """Open a new branch of a run from the restorable checkpoint of the step, or with the id, `target`. Step 0 is the beginning.

    `exclude` are filters for rows that the branch leaves out, in a mixture after the label of their source. The report counts how
    many of them the checkpoint has seen already, and names the newest checkpoint that has seen none. `nonce` is the caller's name
    for this rewind: a repeated call changes nothing. `spec` is the run's job spec and names the current places.

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
    landed = [row for row in rows if isinstance(row, RewindRow) and row.nonce == nonce]
    if landed:
        return _report_again(ledger, rows, landed[0], spec)
    found = _target(run, rows, target)
    target_id = None if found is None else found.checkpoint_id
    leg = _leg_of(run, rows, target_id)
    if spec is not None:
        check_sources(spec, leg)
    wanted = _exclusions(leg, exclude)
    check_branch(Plans(lakehouse), leg, wanted, spec, begins=found is None)
    # at the beginning the next launch needs these pins, and no checkpoint names them
    facts = {"host": socket.gethostname(), **(planned(leg) if found is None else {})}
    if found is not None:
        check_files(found, files)
    done = commit_rewind(ledger, run, nonce=nonce, checkpoint_id=target_id, exclude=wanted, why=why, facts=facts)
    report_command(spec, {"event": WENT_BACK, "attempts": [done.attempt]})
    return replace(done, **seen_before(lakehouse, run, rows, done.checkpoint_id, wanted, (leg, spec)))


def _check_store_files(ledger: Ledger, run: str, spec: JobSpec | None) -> StoreFiles:
    """Return the files of the run's store, and check that the catalog is not older than they are."""
    if spec is None:
        check_ledger(ledger.lakehouse, run)
        return StoreFiles(ledger.lakehouse.config.properties)
    tiers = tiers_of(spec)
    check_store(ledger, run, tiers.durable_run(), tiers.files)
    return tiers.files


def _report_again(ledger: Ledger, rows: list[LedgerRow], landed: RewindRow, spec: JobSpec | None) -> Rewound:
    run = landed.run
    done = commit_rewind(ledger, run, nonce=landed.nonce, checkpoint_id=None)
    wanted = tuple(landed.exclude)
    leg = _leg_of(run, rows, done.checkpoint_id)
    return replace(done, **seen_before(ledger.lakehouse, run, rows, done.checkpoint_id, wanted, (leg, spec)))


def _target(run: str, rows: list[LedgerRow], target: int | str) -> CheckpointRow | None:
    """Return the row of the checkpoint to go back to, or None for the beginning of a run that began without one."""
    if target == 0:
        first = first_checkpoint(rows)
        if first is None:
            raise SpecInvalid(
                f"expected a checkpoint of run {run!r}, found none: it is at its beginning, nothing to rewind"
            )
        if first.step > 0:
            return None
        target = first.checkpoint_id  # an adopted or forked run cannot begin without that state
    if isinstance(target, int):
        return restorable(run, rows, target)
    return restorable(run, rows, None, checkpoint_id=target)


def _leg_of(run: str, rows: list[LedgerRow], checkpoint_id: str | None) -> Leg:
    """Return the leg of a checkpoint, or the first one of the run."""
    found = first_leg_of(rows) if checkpoint_id is None else leg_of(rows, checkpoint_id)
    if found is None:
        raise LedgerError(f"expected the first leg of run {run!r} in the ledger, found none: restore the table")
    return found


def _exclusions(leg: Leg, exclude: Sequence[str | tuple[str, str] | Exclusion]) -> tuple[Exclusion, ...]:
    return tuple(each if isinstance(each, Exclusion) else _exclusion(leg, each) for each in exclude)


def _exclusion(leg: Leg, given: str | tuple[str, str]) -> Exclusion:
    labels = [each.name for each in leg.sources]
    source, where = given if isinstance(given, tuple) else (None, given)
    if source is None and len(labels) > 1:
        raise SpecInvalid(
            f"expected the source whose rows are to be excluded, found none named: --source one of {labels!r}"
        )
    if source is not None and source not in labels:
        raise SpecInvalid(f"expected one of the sources {labels!r}, found {source!r}")
    return Exclusion(source=labels.index(source) if source else 0, where=where)
