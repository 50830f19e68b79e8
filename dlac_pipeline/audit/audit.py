"""Audit of a run: the tables and the data files in, the fate of each planned row out.

It uses no code that computed the order. The slices in the lakehouse define what must be consumed, and SQL decides whether it
was. It also checks that the data files exist and are the planned ones: their footers against the work units.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import duckdb
import pyarrow as pa
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.lakehouse.errors import NoSuchTable
from dlac_pipeline.lakehouse.files.open_file import open_file
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.sources import retained_snapshots
from dlac_pipeline.lakehouse.ledger.branches import checkpoint_of, last_seq_as_head
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.run_rows import no_such_run

_THREADS = 8
_NAMED = 10
"""Data files that are named one by one. Further ones are counted."""
AUDITED = "totals problems advances slices units"
"""Tables and views that an audit asks."""
_NO_VALUE = "expected a value in every column of the ledger that the audit reads, found a row without one"
"""Message for a sentence that would have to name a NULL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """Result of an audit on one lineage of a run. Rows are counted once per pass."""

    run: str
    head_checkpoint: str | None
    step: int
    finished: bool
    attempts: int
    checkpoints: int
    """On the lineage."""
    checkpoints_abandoned: int
    """Checkpoints that were committed, and abandoned by a rewind or a quarantine."""
    recoveries: int
    passes_entered: int
    passes_finished: int
    rows_live: int
    """Live rows of one pass over each source: of the last pass entered. For a followed table, of all passes entered."""
    rows_consumed: int
    rows_duplicated: int
    """Rows consumed again in the same pass, or in another one over a followed table. Each repetition counts."""
    rows_missing: int
    """Rows before a key group's cursor that no checkpoint consumed."""
    rows_pending: int
    """Rows past the cursors, in the passes that were entered. Rows read in part count."""
    rows_filtered: int
    """Left out by a transform, or without any item: read, and in no sample."""
    rows_quarantined: int
    """Rows that a transform refused, or that were left out because their row group does not decode or ranks died at them."""
    rows_excluded: int
    """Rows of the planned row groups that are not live: deleted, left out by the filter, or excluded before they were read."""
    rows_partial: int
    """Rows of which only the first items were read."""
    rows_not_applied: int
    """Consumed by optimizer steps that the engine skipped, without a replay that was applied."""
    adopted_from: str | None
    """Origin of the first checkpoint, if others wrote it. Its consumption is unknown."""
    forked_from: str | None
    """Id of the checkpoint of another run that the first one is a copy of: what that has seen, this run has seen."""
    problems: tuple[str, ...]
    """Other contradictions, each with the expected and the found value."""
    recorded_checkpoint: str | None = None
    """Head of the earlier audit, by whose record the advances and data files up to there were not audited again."""

    @property
    def exact(self) -> bool:
        """True if every row before the cursors was consumed exactly once, and nothing contradicts it."""
        return not (self.rows_duplicated or self.rows_missing or self.problems)

    def to_json(self) -> dict[str, Any]:
        """This report as plain data, `exact` included."""
        return {**asdict(self), "problems": list(self.problems), "exact": self.exact}


def audit_run(lakehouse: Lakehouse, run: str, checkpoint: str | None = None) -> AuditReport:
    """Audit a run, or its state when a checkpoint (id or step) was last the head. Raises as `open_run`."""
    with open_run(lakehouse, run, checkpoint, query=AUDITED) as connection:
        return audit_open_run(lakehouse, connection, run)


def audit_open_run(lakehouse: Lakehouse, connection: duckdb.DuckDBPyConnection, run: str) -> AuditReport:
    """Audit a run on a connection that `open_run` gave."""
    totals = rows_of(connection, "FROM totals WHERE run = ?", [run])[0]
    problems = [*_problems(connection, run), *_file_problems(connection, lakehouse, run)]
    return AuditReport(**totals, problems=tuple(problems))


def open_run(
    lakehouse: Lakehouse,
    run: str,
    checkpoint: str | None = None,
    *,
    query: str | None = None,
    merge: Callable[[duckdb.DuckDBPyConnection], bool] = lambda _: False,
) -> duckdb.DuckDBPyConnection:
    """Open an audit connection for one run, for many questions. An id or a step selects an earlier state, as in `audit_run`.

    `query`: only what it needs is defined. `merge`: as in `open_audit`.

    Raises:
        NoSuchRun: the ledger has no row of it.
        NoSuchCheckpoint: it has no such checkpoint.
        SpecInvalid: the run passed the step more than once.
        CatalogUnreachable: the catalog does not answer.
        LedgerOlderThanStore: the catalog was restored from an older backup.
    """
    check_ledger(lakehouse, run)
    until_seq = None
    if checkpoint is not None:
        rows = Ledger(lakehouse).head_rows(run)
        until_seq = last_seq_as_head(rows, checkpoint_of(run, rows, checkpoint).checkpoint_id)
    connection = open_audit(lakehouse, run=run, until_seq=until_seq, query=query, merge=merge)
    if not connection.execute("SELECT count(*) FROM consumption").fetchall()[0][0]:
        connection.close()
        raise no_such_run(run, Ledger(lakehouse).runs())
    return connection


def _problems(connection: duckdb.DuckDBPyConnection, run: str) -> list[str]:
    rows = rows_of(connection, "SELECT problem FROM problems WHERE run = ?", [run])
    return sorted(row["problem"] or _NO_VALUE for row in rows)


def _file_problems(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse, run: str) -> list[str]:
    """Return the problems of the data files that the surviving lineage has entered. Those of expired snapshots may be gone."""
    units = rows_of(
        connection,
        "SELECT DISTINCT u.file_path, u.row_group, u.first_row, u.rows, u.plan_id "
        "FROM advances AS a ANTI JOIN audited USING (checkpoint_id) JOIN slices AS s USING (cut_id, key_group, block) "
        "JOIN units AS u ON u.plan_id = s.plan_id AND u.unit = s.unit "
        "WHERE a.run = ? ORDER BY u.file_path, u.row_group",
        [run],
    )
    by_file = {path: list(of_file) for path, of_file in groupby(units, key=itemgetter("file_path"))}
    tables, expired = _source_files(connection, lakehouse)
    own = lakehouse.own("consumption").io

    def answer(path: str) -> str | None:
        return _problem_of_file(tables.get(by_file[path][0]["plan_id"], own), path, by_file[path], expired)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
        problems = [problem for problem in pool.map(answer, by_file) if problem is not None]
    if len(problems) > _NAMED:
        return [*problems[:_NAMED], f"{len(problems) - _NAMED} more data files are missing or differ from their plan"]
    return problems


def _source_files(connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse) -> tuple[dict[str, FileIO], set[str]]:
    """Return plan -> file access of its table, which counts by its uuid, and the plans of expired snapshots."""
    plans = rows_of(connection, "SELECT plan_id, source_table, table_uuid, snapshot_id FROM plans", [])
    tables: dict[str, Table] = {}
    for name in {plan["source_table"] for plan in plans}:
        with suppress(NoSuchTable):
            table = lakehouse.load(name)
            tables[str(table.metadata.table_uuid)] = table
    retained = {uuid: retained_snapshots(table) for uuid, table in tables.items()}
    known = [plan for plan in plans if plan["table_uuid"] in tables]
    expired = {plan["plan_id"] for plan in known if plan["snapshot_id"] not in retained[plan["table_uuid"]]}
    return {plan["plan_id"]: tables[plan["table_uuid"]].io for plan in known}, expired


def _problem_of_file(io: FileIO, path: str, units: list[dict[str, Any]], expired: set[str]) -> str | None:
    try:
        with io.new_input(path).open() as stream:
            counts = open_file(path, stream, ()).footer.rows
    except (OSError, pa.ArrowException) as err:
        if isinstance(err, FileNotFoundError) and expired.issuperset(unit["plan_id"] for unit in units):
            return None
        groups = len({unit["row_group"] for unit in units})
        return f"expected the data file {path!r} with {groups} planned row groups, found {type(err).__name__}: {err}"
    found = dict(enumerate(zip(accumulate(counts, initial=0), counts, strict=False)))  # the first row, and how many
    for unit in units:
        planned = (unit["first_row"], unit["rows"])
        if found.get(unit["row_group"]) != planned:
            return (
                f"expected {_describe_rows(planned)} in row group {unit['row_group']} of data file {path!r}, as planned, found "
                f"{_describe_rows(found.get(unit['row_group']))}: the file was changed since; restore it"
            )
    return None


def _describe_rows(rows: tuple[int, int] | None) -> str:
    return "no such row group" if rows is None else f"{rows[1]:,} rows from row {rows[0]:,}"
