"""Ledger of consumption: the rows of a run, its fence, and the one loop for all appends.

A commit to the ledger is THE commit point of a checkpoint. Every append moves `main`, has `seq` + 1 in all its rows, and is
built on the same table object on which the fence was read. pyiceberg asserts that `main` has not moved since, so no process
can have changed the fence in between. After any doubt the loop reads again and decides from the rows.
"""

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, overload

import pyarrow as pa
from pyiceberg.expressions import And
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import CatalogUnreachable, CommitConflict, CommitOutcomeUnknown
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, among, equals, last_sequence_number, more_than, reachable
from dlac_pipeline.lakehouse.iceberg.own_rows import read_rows
from dlac_pipeline.lakehouse.ledger import run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.arrow_rows import CONSUMPTION_ARROW, parse_rows
from dlac_pipeline.lakehouse.ledger.journal import record_appends, seqs_by_run
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, ExportRow, LedgerRow, ReplayRow
from dlac_pipeline.lakehouse.maintenance.expiry import UPKEEP_OF_SNAPSHOT, committing
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

T = TypeVar("T")
R = TypeVar("R", bound=LedgerRow)
Kinds = Sequence[type[R]]
_RUN_OF_SNAPSHOT = "dlac.run"
"""Property of a snapshot: whose rows it added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A read of a run: valid only together with the table object it was read from."""

    run: str
    table: Table
    fence: run_rows.Fence
    finished: bool

    @property
    def exists(self) -> bool:
        """True if the ledger has a row of this run."""
        return self.fence.seq > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Append:
    """Rows to append and the fence that they install. `finished` drops the fence property instead."""

    rows: Sequence[LedgerRow]
    fence: run_rows.Fence
    finished: bool = False


Decide = Callable[[RunState], Append | None]


class Ledger:
    """The `consumption` table of one lakehouse. Once `stop` is set, no append to it is repeated."""

    def __init__(self, lakehouse: Lakehouse, *, deadline_s: float = 180.0, stop: threading.Event | None = None) -> None:
        self.lakehouse = lakehouse
        self._deadline_s = deadline_s
        self._stop = stop or threading.Event()
        self._head_rows: tuple[Any, list[Any]] = ((), [])
        """Key (run, table, snapshot) and rows of the last read of what defines the state of a run."""

    @property
    def table_uuid(self) -> str:
        """Identity of the ledger table, named by every manifest."""
        return self.lakehouse.uuid_of_own("consumption")

    def state(self, run: str) -> RunState:
        """Return the run's current fence. It is rebuilt from rows where the cached property is absent."""
        return self.lakehouse.look("consumption", lambda table: self._state(table, run))

    def _state(self, table: Table, run: str) -> RunState:
        cached = table.properties.get(fence_property(run))
        if cached is not None:
            attempt, nonce, seq, head = json.loads(cached)
            fence = run_rows.Fence(attempt=attempt, nonce=nonce, seq=seq, head=head)
            return RunState(run=run, table=table, fence=fence, finished=False)
        columns = ("seq", "kind", "attempt", "nonce", "head_after", "checkpoint_id")
        # every append has a row of one of these kinds
        rows = self._scan(table, run, columns=columns, kinds=typed_rows.HEAD_KINDS)
        fence, finished = run_rows.fence_of_rows(rows), run_rows.finished_of_rows(rows)
        return RunState(run=run, table=table, fence=fence, finished=finished)

    @overload
    def rows(self, run: str, *, after: int = 0) -> list[LedgerRow]: ...
    @overload
    def rows(self, run: str, *, kinds: Kinds[R], after: int = 0, columns: Sequence[str] = ("*",)) -> list[R]: ...
    def rows(
        self, run: str, *, kinds: Kinds[Any] = (), after: int = 0, columns: Sequence[str] = ("*",)
    ) -> Sequence[LedgerRow]:
        """Return the rows of a run after the `seq` named by `after`, in order of `seq`, restricted to `kinds` when given.

        Only `columns` are read, `seq` and `kind` among them. The fields of other columns have their default values.
        """
        return self.lakehouse.look(
            "consumption", lambda table: self._scan(table, run, kinds=kinds, after=after, columns=columns)
        )

    def rows_at(self, state: RunState, *, kinds: Kinds[R], after: int = 0, columns: Sequence[str] = ("*",)) -> list[R]:
        """Return the rows at one read, as `rows` does. Raises `CommitConflict` if upkeep removed the files of that read."""
        with as_commit_conflict():
            return self._scan(state.table, state.run, kinds=kinds, after=after, columns=columns)

    def rows_of_runs(self, kinds: Sequence[type[LedgerRow]], *, columns: Sequence[str]) -> dict[str, list[LedgerRow]]:
        """Return run -> its rows of some kinds, in order of `seq`. Of `columns` only, as `rows` does."""
        wanted = among("kind", [each.kind for each in kinds])
        found = parse_rows(self.lakehouse.read_own("consumption", wanted, columns=columns))
        rows: dict[str, list[LedgerRow]] = defaultdict(list)
        for row in self.translate(found):
            rows[row.run].append(row)
        return rows

    def head_rows(self, run: str) -> list[LedgerRow]:
        """The rows that define the state of a run, in order of `seq`. Raises `NoSuchRun` if there are none."""
        rows = self.rows(run, kinds=typed_rows.HEAD_KINDS)
        if not rows:
            raise run_rows.no_such_run(run, self.runs())
        return rows

    def restorable(self, run: str, step: int | None = None, *, checkpoint_id: str | None = None) -> CheckpointRow:
        """The row of the checkpoint of a step or with an id, or of the head. Raises `NoSuchRun` or `NoSuchCheckpoint`."""
        return run_rows.restorable(run, self.head_rows(run), step, checkpoint_id=checkpoint_id)

    def consumed_by(self, run: str, checkpoints: Sequence[str]) -> dict[str, Counter[int]]:
        """Checkpoint id -> rows of each source that it consumed since its parent, of these checkpoints."""
        if not checkpoints:
            return {}
        wanted = And(And(equals("run", run), equals("kind", AdvanceRow.kind)), among("checkpoint_id", checkpoints))
        columns = ("checkpoint_id", "source", "rows_consumed")
        found = self.lakehouse.read_own("consumption", wanted, columns=columns)
        totals: dict[str, Counter[int]] = {name: Counter() for name in checkpoints}
        for name, source, rows in zip(*(found[each].to_pylist() for each in columns), strict=True):
            totals[name][source] += rows
        return totals

    def skipped_steps(self, checkpoints: Sequence[CheckpointRow]) -> set[int]:
        """Return the steps before some checkpoints of a run that the engine did not apply."""
        skipping = {row.checkpoint_id: row for row in checkpoints if row.skipped_steps}
        if not skipping:
            return set()
        first = min(skipping.values(), key=lambda row: row.seq)
        columns = ("seq", "kind", "checkpoint_id", "applied", "first_step", "last_step")
        advances = self.rows(first.run, kinds=(AdvanceRow, ReplayRow), after=first.seq - 1, columns=columns)
        mine = [row for row in advances if row.checkpoint_id in skipping and not row.applied]
        return {step for row in mine for step in range(row.first_step, row.last_step + 1)}

    def export(self, digest: str) -> ExportRow | None:
        """The row of the exported file with this digest, in any run."""
        rows = parse_rows(self.lakehouse.read_own("consumption", equals("kind", ExportRow.kind)))
        return next((row for row in rows if isinstance(row, ExportRow) and row.digest == digest), None)

    def runs(self) -> list[str]:
        """Names of all runs in the ledger, sorted."""
        return sorted(set(self.lakehouse.read_own("consumption", columns=("run",))["run"].to_pylist()))

    def appends(self) -> dict[str, set[int]]:
        """Run -> the `seq`s of its appends, of all runs."""
        return seqs_by_run(self.lakehouse.read_own("consumption", columns=("run", "seq")))

    def translate(self, rows: list[R]) -> list[R]:
        """Return rows as the table has them with their places in a moved lakehouse."""
        moved = self.lakehouse.relocation
        return [run_rows.translate_row(row, moved.uri_here, moved.here) for row in rows] if moved.moves else rows

    def append(self, run: str, decide: Decide) -> RunState:
        """Read, let `decide` return what to append, commit, and repeat on conflict or doubt. Return the last read.

        `decide` raises to refuse. It returns None when its rows exist already. Raises `SpecInvalid` for a new name that no run
        can have, `CommitOutcomeUnknown` after the deadline or a requested stop without an answer of the catalog, and
        `LakehouseError` if the warehouse cannot be written.
        """
        try:
            return retrying(self._deadline_s, stop=self._stop)(_Tries(self, run, decide).once)
        except (CommitConflict, CatalogUnreachable) as err:
            how_long = "until it was stopped" if self._stop.is_set() else f"for {self._deadline_s:.0f} s"
            raise CommitOutcomeUnknown(
                f"an append to the ledger of run {run!r} was repeated {how_long} without an answer: "
                f"{err}; whether it landed is decided by the next recovery, from the rows"
            ) from err

    def patiently(self, work: Callable[[], T]) -> T:
        """Repeat the preparation of an append for as long as the append itself. Raises `CatalogUnreachable` in the end."""
        return retrying(self._deadline_s, stop=self._stop)(work)

    def _scan(
        self, table: Table, run: str, *, kinds: Kinds[R], after: int = 0, columns: Sequence[str] = ("*",)
    ) -> list[R]:
        read = (run, table.metadata.table_uuid, table.metadata.current_snapshot_id)
        is_shared = kinds == typed_rows.HEAD_KINDS and columns == ("*",) and not after
        known, rows_known = self._head_rows
        if is_shared and known == read:
            return list(rows_known)  # a snapshot never changes, and a claim reads it several times
        wanted = equals("run", run)
        if kinds:
            wanted = And(wanted, among("kind", [each.kind for each in kinds]))
            if columns == ("*",):
                columns = list({"kind"} | {each.column for kind in kinds for each in typed_rows.columns_of(kind)})
        if after:
            wanted = And(wanted, more_than("seq", after))
        with reachable(self.lakehouse.config.uri):
            rows: list[Any] = parse_rows(read_rows(table, wanted, columns=columns))
        found = self.translate([row for row in rows if not kinds or isinstance(row, tuple(kinds))])
        if is_shared:
            self._head_rows = (read, list(found))
        return found


class _Tries:
    """The tries of one append. Reading a long run takes long: a decision holds until the run itself has other rows."""

    def __init__(self, ledger: Ledger, run: str, decide: Decide) -> None:
        self._ledger = ledger
        self._run = run
        self._decide = decide
        self._decided: tuple[RunState, Append] | None = None

    def once(self) -> RunState:
        state, wanted = self._still_decided() or self._decided_anew()
        if wanted is None:
            return state
        run, fence, table, lakehouse = self._run, wanted.fence, state.table, self._ledger.lakehouse
        arrow = recorded_rows(lakehouse, run, fence, wanted.rows)
        with committing(lakehouse, table) as transaction:
            transaction.append_small(arrow, snapshot_properties={_RUN_OF_SNAPSHOT: run, "dlac.seq": str(fence.seq)})
            if not wanted.finished:
                cached = json.dumps([fence.attempt, fence.nonce, fence.seq, fence.head])
                transaction.set_properties({fence_property(run): cached})
            elif fence_property(run) in table.properties:
                transaction.remove_properties(fence_property(run))
        lakehouse.remember("consumption", table)
        record_appends(table, arrow, newest=True)
        return RunState(run=run, table=table, fence=fence, finished=wanted.finished)

    def _decided_anew(self) -> tuple[RunState, Append | None]:
        state = self._ledger.state(self._run)
        wanted = self._decide(state)
        # before the first row of a run, whichever command appends it: a row is permanent, and the name becomes a folder
        if not state.exists:
            run_rows.check_run_name(self._run)
        self._decided = None if wanted is None else (state, wanted)
        return state, wanted

    def _still_decided(self) -> tuple[RunState, Append] | None:
        """Return the decision of an earlier try, on the present table. None: no decision, or the run may have other rows."""
        if self._decided is None:
            return None
        state, wanted = self._decided
        table = self._ledger.lakehouse.own("consumption")
        if not _same_rows(self._run, state.table, table):
            return None
        # the next try reads only what other processes have appended since this one
        self._decided = (replace(state, table=table), wanted)
        return self._decided


def recorded_rows(lakehouse: Lakehouse, run: str, fence: run_rows.Fence, rows: Sequence[LedgerRow]) -> pa.Table:
    """Return rows as the table records them: with the facts of a commit under `fence`, and with recorded places."""
    moved, rows = lakehouse.relocation, [_complete(row, run, fence) for row in rows]
    if moved.moves:
        rows = [run_rows.translate_row(row, moved.to_recorded_uri, moved.to_recorded) for row in rows]
    return pa.Table.from_pylist([row.to_columns() for row in rows], schema=CONSUMPTION_ARROW)


def fill_journal(ledger: Ledger, run: str, lacking: set[int]) -> None:
    """Write the entries of appends of a run that the journal lacks."""
    table = ledger.lakehouse.own("consumption")
    wanted = And(equals("run", run), more_than("seq", min(lacking) - 1))
    rows = ledger.lakehouse.read_own("consumption", wanted).sort_by("seq")
    bounds = [rows["seq"].to_numpy().searchsorted([seq, seq + 1]) for seq in sorted(lacking)]
    appends = [rows.slice(start, end - start) for start, end in bounds]
    record_appends(table, *appends, newest=max(lacking) == rows["seq"][-1].as_py())


def fence_property(run: str) -> str:
    """Return the name of the table property that caches the fence of a run."""
    return f"dlac.fence.{run}"


def _same_rows(run: str, before: Table, now: Table) -> bool:
    """Return True if all commits in between are known, and belong to other runs or moved no row.

    The oldest snapshot that an expiry leaves names no parent, as the first one of a table does. The sequence number
    distinguishes them: each commit takes the next one.
    """
    read_at, snapshot = before.current_snapshot(), now.current_snapshot()
    last = None if read_at is None else read_at.snapshot_id
    known = 0
    while snapshot is not None and snapshot.snapshot_id != last:
        properties = {} if snapshot.summary is None else snapshot.summary.additional_properties
        if properties.get(_RUN_OF_SNAPSHOT, run if UPKEEP_OF_SNAPSHOT not in properties else "") == run:
            return False
        known += 1
        snapshot = now.snapshot_by_id(snapshot.parent_snapshot_id or 0)
    found = None if snapshot is None else snapshot.snapshot_id
    complete = known == last_sequence_number(now) - last_sequence_number(before)
    return (
        found == last
        and complete
        and before.properties.get(fence_property(run)) == now.properties.get(fence_property(run))
    )


def _complete(row: LedgerRow, run: str, fence: run_rows.Fence) -> LedgerRow:
    row = replace(row, run=run, committed_at=datetime.now(UTC), format_version=FORMAT_VERSION)
    return replace(row, seq=fence.seq, attempt=fence.attempt, nonce=fence.nonce, head_after=fence.head)
