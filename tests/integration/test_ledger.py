from dataclasses import replace

import pytest

from dlac_pipeline.extensions.branches.appends import commit_rewind
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.extensions.upkeep.upkeep import compact
from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.errors import Fenced, HeadMoved, NoSuchCheckpoint, RowsBetween, RunFinished, SteppedAside
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint, finish, quarantine
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.run_rows import Fence, out_of, restorable_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    AdvanceRow,
    CheckpointRow,
    ClaimRow,
    LedgerRow,
    NameRow,
    QuarantinedCheckpointRow,
)
from tests.conftest import Arena

RUN = "r1"


def claimed(ledger: Ledger, nonce: str = "n1", replaces: int = 0) -> Attempt:
    """The attempt that this claim makes."""
    return Attempt(run=RUN, number=claim(ledger, RUN, nonce=nonce, replaces=replaces).fence.attempt, nonce=nonce)


@pytest.fixture
def ledger(arena: Arena) -> Ledger:
    """The ledger of a lakehouse without runs."""
    return Ledger(arena.lakehouse)


@pytest.fixture
def attempt(ledger: Ledger) -> Attempt:
    """The first attempt of the run."""
    return claimed(ledger)


def checkpoint(ledger: Ledger, attempt: Attempt, name: str, parent: str | None) -> Fence:
    """Commit a checkpoint of one row and one advance. Return the fence after it."""
    rows: list[LedgerRow] = [CheckpointRow(checkpoint_id=name, parent=parent), AdvanceRow(checkpoint_id=name)]
    return commit_checkpoint(ledger, attempt, checkpoint_id=name, parent=parent, rows=rows).fence


def test_a_run_from_claim_to_finish(arena: Arena, ledger: Ledger) -> None:
    """Every append has the next seq, names the resulting head in all its rows, and `finish` leaves no property."""
    assert not ledger.state(RUN).exists
    attempt = claimed(ledger)
    assert checkpoint(ledger, attempt, "a", None) == Fence(attempt=1, nonce="n1", seq=2, head="a")
    checkpoint(ledger, attempt, "b", "a")
    finish(ledger, attempt, step=20)
    assert sorted((row.seq, row.kind, row.attempt, row.head_after) for row in ledger.rows(RUN)) == [
        *((1, "claim", 1, None), (2, "advance", 1, "a"), (2, "checkpoint", 1, "a"), (3, "advance", 1, "b")),
        *((3, "checkpoint", 1, "b"), (4, "finish", 1, "b")),
    ]
    assert ledger.state(RUN).finished
    assert not [name for name in arena.lakehouse.own("consumption").properties if name.startswith("dlac.fence")]
    assert ledger.runs() == [RUN]
    with pytest.raises(RunFinished, match="'b'"):
        claimed(ledger, "n2", replaces=1)


def test_the_fence_is_rebuilt_from_rows(arena: Arena, ledger: Ledger) -> None:
    """Without the cached property the rows say the same: owner, seq and head."""
    checkpoint(ledger, claimed(ledger), "a", None)
    claimed(ledger, "n2", replaces=1)
    before = ledger.state(RUN)
    with arena.lakehouse.own("consumption").transaction() as transaction:
        transaction.remove_properties(f"dlac.fence.{RUN}")
    rebuilt = ledger.state(RUN)
    assert f"dlac.fence.{RUN}" not in rebuilt.table.properties
    assert rebuilt.fence == before.fence == Fence(attempt=2, nonce="n2", seq=3, head="a")
    checkpoint(ledger, Attempt(run=RUN, number=2, nonce="n2"), "b", "a")
    assert f"dlac.fence.{RUN}" in ledger.state(RUN).table.properties


def test_runs_do_not_see_each_other(ledger: Ledger) -> None:
    """A name that begins like another's, and rows of other runs, change nothing."""
    checkpoint(ledger, claimed(ledger), "a", None)
    assert not ledger.state("r").exists
    other = claim(ledger, "r11", nonce="x", replaces=0).fence
    assert (other.attempt, other.seq) == (1, 1)
    assert {row.run for row in ledger.rows(RUN)} == {RUN}


def test_two_claims_of_one_failed_attempt(arena: Arena) -> None:
    """The first wins. The second steps aside and appends nothing."""
    ledger, other = Ledger(arena.lakehouse), Ledger(connect(arena.lakehouse.config))
    claimed(ledger)
    assert claimed(other, "n2", replaces=1).number == 2
    with pytest.raises(SteppedAside, match=r"expected attempt 1 .* found attempt 2"):
        claimed(ledger, "n3", replaces=1)
    assert [row.nonce for row in ledger.rows(RUN, kinds=(ClaimRow,))] == ["n1", "n2"]


def test_claiming_again_with_the_same_nonce_changes_nothing(ledger: Ledger) -> None:
    """A claim whose answer was lost is found by its nonce."""
    claimed(ledger)
    assert claimed(ledger, "n1", replaces=0).number == 1
    assert len(ledger.rows(RUN)) == 1


def test_a_stale_attempt_is_always_refused(ledger: Ledger) -> None:
    """Checkpoint, quarantine and finish of a fenced attempt are refused, naming both attempts; no row is left."""
    old = claimed(ledger)
    checkpoint(ledger, old, "a", None)
    claimed(ledger, "n2", replaces=1)
    before = ledger.rows(RUN)
    with pytest.raises(Fenced, match=r"attempt 1 \(n1\).*owned by attempt 2 \(n2\)"):
        checkpoint(ledger, old, "b", "a")
    with pytest.raises(Fenced):
        quarantine(ledger, old, damaged={"a": "?"}, head_after=None)
    with pytest.raises(Fenced):
        finish(ledger, old, step=1)
    assert ledger.rows(RUN) == before


def test_a_repeated_commit_is_recorded_once(ledger: Ledger, attempt: Attempt) -> None:
    """Head = me means done: the same checkpoint committed again appends nothing."""
    assert checkpoint(ledger, attempt, "a", None) == checkpoint(ledger, attempt, "a", None)
    assert len(ledger.rows(RUN, kinds=(CheckpointRow,))) == 1


def test_other_parent_in_attempt_is_error(ledger: Ledger, attempt: Attempt) -> None:
    """A checkpoint that does not hang on the head is refused, naming both."""
    checkpoint(ledger, attempt, "a", None)
    with pytest.raises(HeadMoved, match=r"expected 'z' to be the head .* found 'a'"):
        checkpoint(ledger, attempt, "b", "z")


def test_a_quarantine_steps_the_head_back_once(ledger: Ledger, attempt: Attempt) -> None:
    """The damaged checkpoint is named with its reason, the head is the ancestor, and repeating it appends nothing."""
    checkpoint(ledger, attempt, "a", None)
    checkpoint(ledger, attempt, "b", "a")
    for _ in range(2):
        assert quarantine(ledger, attempt, damaged={"b": "a flipped bit"}, head_after="a").fence.head == "a"
    (row,) = ledger.rows(RUN, kinds=(QuarantinedCheckpointRow,))
    assert (row.checkpoint_id, row.reason) == ("b", "a flipped bit")


def test_what_was_decided_holds_beside_busy_other_runs(arena: Arena) -> None:
    """A slow reader of a long run decides once, however often other runs commit. A commit of the run itself counts."""
    ledger, others = Ledger(arena.lakehouse, deadline_s=20.0), Ledger(arena.lakehouse)
    claimed(ledger)
    looks: list[int] = []

    def decide(state: RunState) -> Append | None:
        looks.append(state.fence.seq)
        claim(others, f"busy-{len(looks)}", nonce="n", replaces=0)  # while it reads, each time
        if len(looks) == 1:
            return _named(state, "first")
        raise RowsBetween("the run's own")

    assert ledger.append(RUN, decide).fence.seq == 2
    assert looks == [1]
    assert [row.kind for row in ledger.rows(RUN)] == ["claim", "name"]


def test_decision_repeats_after_other_rows(arena: Arena) -> None:
    """A decision is repeated after other rows of the run, also if other runs and a merge of files have committed since."""
    ledger, others = Ledger(arena.lakehouse), Ledger(arena.lakehouse)
    claimed(ledger)
    looks: list[int] = []

    def decide(state: RunState) -> Append | None:
        looks.append(state.fence.seq)
        if len(looks) == 1:
            others.append(RUN, lambda now: _named(now, "by another"))
            for number in range(8):
                claim(others, f"busy-{number}", nonce="n", replaces=0)
            assert compact(arena.lakehouse).files == 0
        return _named(state, "mine")

    assert ledger.append(RUN, decide).fence.seq == 3
    assert looks == [1, 2]


@pytest.mark.soak
def test_expired_history_is_decided_again(arena: Arena) -> None:
    """A claim that is late by a whole run, which was claimed, finished and pushed out of the history, is refused."""
    ledger, others = Ledger(arena.lakehouse), Ledger(arena.lakehouse)
    looks: list[bool] = []

    def decide(state: RunState) -> Append | None:
        looks.append(state.finished)
        if state.finished:
            raise RunFinished("it is finished")
        finish(others, claimed(others), step=0)
        for number in range(KEEP_SNAPSHOTS + 1):
            claim(others, f"busy-{number}", nonce="n", replaces=0)
        return Append(rows=[ClaimRow()], fence=Fence(attempt=1, nonce="late", seq=1))

    with pytest.raises(RunFinished):
        ledger.append(RUN, decide)
    assert looks == [False, True]
    assert [row.kind for row in ledger.rows(RUN)] == ["claim", "finish"]


def _named(state: RunState, name: str) -> Append:
    return Append(rows=[NameRow(name=name)], fence=replace(state.fence, seq=state.fence.seq + 1))


def test_quarantined_checkpoint_is_not_restorable(ledger: Ledger, attempt: Attempt) -> None:
    """A damaged checkpoint cannot be restored, rewound to, named or exported, by id or by step."""
    checkpoint(ledger, attempt, "a", None)
    checkpoint(ledger, attempt, "b", "a")
    quarantine(ledger, attempt, damaged={"b": "a flipped bit"}, head_after="a")
    assert out_of(ledger.rows(RUN)) == {"b"}
    assert set(restorable_rows(ledger.rows(RUN))) == {"a"}
    with pytest.raises(NoSuchCheckpoint, match=r"'b' that is kept, found \['a'\]"):
        ledger.restorable(RUN, checkpoint_id="b")
    with pytest.raises(NoSuchCheckpoint, match="'b'"):
        commit_rewind(ledger, RUN, nonce="n2", checkpoint_id="b")
    with pytest.raises(NoSuchCheckpoint, match="'b'"):
        name_checkpoint(ledger, RUN, "best", checkpoint_id="b")


def test_other_launch_is_fenced(ledger: Ledger) -> None:
    """An attempt with the owner's number and another nonce, as of a restored catalog, is refused."""
    claimed(ledger)
    with pytest.raises(Fenced, match=r"attempt 1 \(other\).*owned by attempt 1 \(n1\)"):
        checkpoint(ledger, Attempt(run=RUN, number=1, nonce="other"), "a", None)
    assert len(ledger.rows(RUN)) == 1


def test_rows_between_are_noticed(ledger: Ledger, attempt: Attempt) -> None:
    """A checkpoint whose rows were made before others appended to the run is not committed with these rows."""
    checkpoint(ledger, attempt, "a", None)
    name_checkpoint(ledger, RUN, "best")
    rows: list[LedgerRow] = [CheckpointRow(checkpoint_id="b", parent="a")]
    with pytest.raises(RowsBetween, match="expected 2 to be the last seq of run 'r1', found 3"):
        commit_checkpoint(ledger, attempt, checkpoint_id="b", parent="a", rows=rows, seq=2)
    assert commit_checkpoint(ledger, attempt, checkpoint_id="b", parent="a", rows=rows, seq=3).fence.head == "b"
