from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse
from sqlalchemy.exc import OperationalError

from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.errors import CommitConflict, CommitOutcomeUnknown, Fenced
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of, write_recovery
from dlac_pipeline.lakehouse.ledger.run_rows import Fence
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LegRow
from tests.conftest import Arena
from tests.small_records import small_recovery
from tests.snapshots import check_readable

RUN = "r1"
Commit = Callable[..., CommitTableResponse]


@pytest.fixture
def ledger(arena: Arena) -> Ledger:
    """A ledger with a claimed run."""
    found = Ledger(arena.lakehouse)
    claim(found, RUN, nonce="n1", replaces=0)
    return found


def checkpoint(ledger: Ledger, name: str, parent: str | None = None) -> RunState:
    """Commit a checkpoint of the first attempt."""
    rows = [CheckpointRow(checkpoint_id=name, parent=parent)]
    attempt = Attempt(run=RUN, number=1, nonce="n1")
    return commit_checkpoint(ledger, attempt, checkpoint_id=name, parent=parent, rows=rows)


def check_usable(lakehouse: Lakehouse, claimed: str = "another") -> None:
    """Check that the ledger takes another append, and that every retained snapshot can be read."""
    claim(Ledger(lakehouse), claimed, nonce="x", replaces=0)
    check_readable(lakehouse)


def once(monkeypatch: pytest.MonkeyPatch, faulty: Callable[[Commit, Any], CommitTableResponse]) -> None:
    """Put `faulty` in the place of the first commit that reaches the catalog; it is handed the real one."""
    real = SqlCatalog.commit_table
    calls = 0

    def commit_table(self: SqlCatalog, *request: Any) -> CommitTableResponse:
        nonlocal calls
        calls += 1
        if calls == 1:
            return faulty(lambda *again: real(self, *again), request)
        return real(self, *request)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)


def replayed(commit: Commit, request: Any) -> CommitTableResponse:
    """The answer of a landed commit is lost and the transport sends the request again."""
    commit(*request)
    return commit(*request)


def landed_but_refused(commit: Commit, request: Any) -> CommitTableResponse:
    """Commit, and report a failure to the caller."""
    commit(*request)
    raise CommitFailedException("the answer of a replay")


def landed_but_unanswered(commit: Commit, request: Any) -> CommitTableResponse:
    """The commit lands, and the connection breaks before the answer."""
    commit(*request)
    raise OperationalError("UPDATE", {}, Exception("server closed the connection unexpectedly"))


def lost_before_landing(commit: Commit, request: Any) -> CommitTableResponse:
    """The connection breaks before the commit lands."""
    raise OperationalError("UPDATE", {}, Exception("could not connect to server"))


@pytest.mark.parametrize("fault", [replayed, landed_but_refused, landed_but_unanswered, lost_before_landing])
def test_a_commit_in_doubt_is_recorded_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Commit, Any], CommitTableResponse]
) -> None:
    """Whatever becomes of a commit's answer, its rows are in the ledger once, and the table stays readable."""
    once(monkeypatch, fault)
    assert checkpoint(ledger, "a").fence.head == "a"
    (row,) = ledger.rows(RUN, kinds=(CheckpointRow,))
    assert (row.checkpoint_id, row.seq) == ("a", 2)
    check_usable(ledger.lakehouse)


def test_landed_append_is_no_conflict(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that landed succeeds although the catalog refused its replay, also where no rows decide."""
    table = ledger.lakehouse.own("plans")
    rows = table.scan().to_arrow()
    once(monkeypatch, landed_but_refused)
    table.append(rows)
    assert len(table.history()) == 1
    check_usable(ledger.lakehouse)


def test_refused_append_is_a_conflict(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that did not land fails as a conflict."""
    table = ledger.lakehouse.own("plans")
    once(monkeypatch, Mock(side_effect=CommitFailedException("another commit was first")))
    with pytest.raises(CommitConflict, match="did not land"):
        table.append(table.scan().to_arrow())
    assert ledger.lakehouse.own("plans").current_snapshot() is None


def test_expired_commit_is_recognized(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit lands, so many others follow that its snapshot is gone, then it is called failed: the rows tell."""
    other = Ledger(connect(ledger.lakehouse.config))

    def landed_long_ago(commit: Commit, request: Any) -> CommitTableResponse:
        response = commit(*request)
        claim(other, "another", nonce="x", replaces=0)
        run_upkeep(other.lakehouse, keep=1)
        with pytest.raises(CommitFailedException):
            commit(*request)
        landed = response.metadata.current_snapshot_id
        assert landed is not None
        assert other.lakehouse.own("consumption").snapshot_by_id(landed) is None
        raise CommitFailedException("the answer of a replay")

    once(monkeypatch, landed_long_ago)
    assert checkpoint(ledger, "a").fence == Fence(attempt=1, nonce="n1", seq=2, head="a")
    assert len(ledger.rows(RUN, kinds=(CheckpointRow,))) == 1
    check_usable(ledger.lakehouse, "third")


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("fault", [replayed, landed_but_refused, landed_but_unanswered, lost_before_landing])
def test_a_recovery_in_doubt_is_written_once(
    arena: Arena, fault: Callable[[Commit, Any], CommitTableResponse], is_new: bool
) -> None:
    """A row of another table than the ledger is looked for before it is appended again, also one that is new."""
    recovery = small_recovery(run=RUN)
    once(arena.monkeypatch, fault)
    write_recovery(arena.lakehouse, recovery, is_new=is_new)
    assert recoveries_of(arena.lakehouse, RUN) == [recovery]


def test_an_append_between_read_and_commit_is_noticed(ledger: Ledger) -> None:
    """Another run's append in between makes the loop look at the table again; what was decided stands, and both are recorded."""
    other = Ledger(connect(ledger.lakehouse.config))
    reads = []

    def decide(state: RunState) -> Append:
        reads.append(state.fence.seq)
        if len(reads) == 1:
            claim(other, "another", nonce="x", replaces=0)
        return Append(rows=[LegRow()], fence=type(state.fence)(attempt=1, nonce="n1", seq=state.fence.seq + 1))

    ledger.append(RUN, decide)
    assert reads == [1]
    assert len(ledger.rows(RUN, kinds=(LegRow,))) == len(other.rows("another")) == 1
    check_usable(ledger.lakehouse)


def test_zombie_before_commit_is_fenced(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A takeover that lands after the zombie has read its fence, and before it commits, still shuts it out."""
    other = Ledger(connect(ledger.lakehouse.config))

    def overtaken(commit: Commit, request: Any) -> CommitTableResponse:
        claim(other, RUN, nonce="n2", replaces=1)
        return commit(*request)

    once(monkeypatch, overtaken)
    with pytest.raises(Fenced, match="owned by attempt 2"):
        checkpoint(ledger, "a")
    assert [row.kind for row in ledger.rows(RUN)] == ["claim", "claim"]
    check_usable(ledger.lakehouse)


def test_long_outage_leaves_unknown_outcome(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its deadline the append stops, and reports that the rows will show the outcome."""
    away = OperationalError("UPDATE", {}, Exception("no route to host"))
    monkeypatch.setattr(SqlCatalog, "commit_table", Mock(side_effect=away))
    with pytest.raises(CommitOutcomeUnknown, match="no route to host"):
        checkpoint(Ledger(ledger.lakehouse, deadline_s=0.5), "a")
