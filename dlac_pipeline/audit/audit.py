"""The audit of a run: from the tables and the data files alone to what became of every planned row.

It computes nothing with the code that made the order; the slices in the lakehouse say what has to be consumed, and SQL says
whether it was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from dlac_pipeline.audit.data_files import file_problems
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.branches import checkpoint_of, last_seq_as_head
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.run_rows import no_such_run

_NO_VALUE = "expected a value in every column of the ledger that the audit reads, found a row without one"
"""Said where a sentence cannot be made, because it would have to name a NULL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What became of the rows of one run, on the lineage that was audited; rows are counted once per pass."""

    run: str
    head_checkpoint: str | None
    step: int
    finished: bool
    attempts: int
    checkpoints: int
    """On the lineage."""
    checkpoints_abandoned: int
    """Committed, and left behind by a rewind or a quarantine."""
    recoveries: int
    passes_entered: int
    passes_finished: int
    rows_live: int
    """Live rows of one pass over each source: of the last one entered; of a followed table, of all that were entered."""
    rows_consumed: int
    rows_duplicated: int
    """Consumed again in the same pass, or in another one over a followed table; once for each time."""
    rows_missing: int
    """Behind a key group's cursor, and consumed by no checkpoint."""
    rows_pending: int
    """Ahead of the cursors, in the passes that were entered; partly read rows count."""
    rows_filtered: int
    """Left out by a transform, or without any item: read, and in no sample."""
    rows_quarantined: int
    """Refused by a transform; or left out, as their row group does not decode, or ranks died at them."""
    rows_excluded: int
    """Rows of the planned row groups that are not live: deleted, left out by the filter, or excluded before they were read."""
    rows_partial: int
    """Rows of which only the first items were read."""
    rows_not_applied: int
    """Consumed by optimizer steps that the engine skipped."""
    adopted_from: str | None
    """Where the first checkpoint came from, if others wrote it: what that has seen is unknown."""
    forked_from: str | None
    """Id of the checkpoint of another run that the first one is a copy of: what that has seen, this run has seen."""
    problems: tuple[str, ...]
    """What else is not as it must be: what was expected, and what was found."""

    @property
    def exact(self) -> bool:
        """Whether every row behind the cursors was consumed exactly once, and nothing contradicts it."""
        return not (self.rows_duplicated or self.rows_missing or self.problems)

    def to_json(self) -> dict[str, Any]:
        """This report as plain data, `exact` included."""
        return {**asdict(self), "problems": list(self.problems), "exact": self.exact}


def audit_run(lakehouse: Lakehouse, run: str, checkpoint: str | None = None) -> AuditReport:
    """Audit a run, finished or not; with an id or a step, as it was when that checkpoint was its head last.

    Raises:
        NoSuchRun: the ledger has no row of it.
        NoSuchCheckpoint: it has no such checkpoint.
        SpecInvalid: the run came by the step more than once.
        CatalogUnreachable: the catalog does not answer.
    """
    with open_run(lakehouse, run, checkpoint) as connection:
        return audit_open_run(lakehouse, connection, run)


def audit_open_run(lakehouse: Lakehouse, connection: duckdb.DuckDBPyConnection, run: str) -> AuditReport:
    """Audit a run on a connection that `open_run` gave."""
    totals = rows_of(connection, "FROM totals WHERE run = ?", [run])[0]
    problems = [*_problems(connection, run), *file_problems(connection, lakehouse, run)]
    return AuditReport(**totals, problems=tuple(problems))


def open_run(lakehouse: Lakehouse, run: str, checkpoint: str | None = None) -> duckdb.DuckDBPyConnection:
    """As `open_audit` for one run, for many questions; with an id or a step, as it was when that checkpoint was its head last.

    Raises:
        NoSuchRun: the ledger has no row of it.
        NoSuchCheckpoint: it has no such checkpoint.
        SpecInvalid: the run came by the step more than once.
        CatalogUnreachable: the catalog does not answer.
        LedgerOlderThanStore: the catalog was restored from an older backup.
    """
    check_ledger(lakehouse, run)
    until_seq = None
    if checkpoint is not None:
        rows = Ledger(lakehouse).head_rows(run)
        until_seq = last_seq_as_head(rows, checkpoint_of(run, rows, checkpoint)["checkpoint_id"])
    connection = open_audit(lakehouse, run=run, until_seq=until_seq)
    if not connection.execute("SELECT count(*) FROM consumption").fetchall()[0][0]:
        connection.close()
        raise no_such_run(run, Ledger(lakehouse).runs())
    return connection


def _problems(connection: duckdb.DuckDBPyConnection, run: str) -> list[str]:
    rows = rows_of(connection, "SELECT problem FROM problems WHERE run = ?", [run])
    return sorted(row["problem"] or _NO_VALUE for row in rows)
