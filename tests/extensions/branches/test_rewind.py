"""Going back: a new branch from an earlier checkpoint, with what it leaves out, beside the old one that stays auditable."""

import json

import pyarrow as pa
import pytest
import torch

import dlac_pipeline
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.checkpoint.interval_choice import Failures
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.extensions.branches.retire import retire_left
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.upkeep.pins import list_pins
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.branches import exclusions_in_force
from dlac_pipeline.lakehouse.ledger.commits import Attempt, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, ClaimRow, LegRow, RewindRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claims import attempts_without_progress, launcher_of
from dlac_pipeline.supervise.failure import failure_of_attempt
from tests.conftest import Arena, Steps, source_rows
from tests.fixtures import Command
from tests.integration.test_legs import append, rewrite


def rows_until(steps: Steps, last: int) -> list[int]:
    """Sorted row ids of the steps up to one."""
    return sorted(row for step, rows in steps.items() if step <= last for row in rows)


def recorded(arena: Arena, run: str, head: str | None = None) -> list[int]:
    """Sorted row ids that the ledger names for a lineage."""
    return sorted(row for rows in arena.recorded(run, head).values() for row in rows)


@pytest.mark.slow
def test_branch_without_rows_ends(arena: Arena) -> None:
    """A rewind that excludes all later rows ends the run with a new leg and the target's state."""
    arena.table(appends=(200,))
    spec = arena.trained("r", world_size=1, passes=1, every_steps=2)
    with pytest.raises(errors.EmptyPlan, match=r"'row_id >= 0'\] leaves none"):
        rewind_run(arena.lakehouse, "r", nonce="op0", target=4, exclude=["row_id >= 0"])
    seen = rows_until(arena.recorded("r"), 4)
    rewind_run(arena.lakehouse, "r", nonce="op1", target=4, exclude=[f"row_id not in ({str(seen)[1:-1]})"])
    assert arena.train(spec) == {}
    target, last = arena.lineage("r")[-2:]
    assert (target.step, last.step, last.parent) == (4, 4, target.checkpoint_id)
    assert [row.checkpoint_id for row in arena.rows("r", LegRow)][-1] == last.checkpoint_id
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems, report.finished, report.step) == (True, (), True, 4)
    assert (report.rows_missing, report.rows_pending, report.rows_consumed) == (0, 0, 128)
    assert audit_run(arena.lakehouse, "r", "4") == report
    rewind_run(arena.lakehouse, "r", nonce="op2", target=target.checkpoint_id)
    arena.train(spec)
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.finished, report.rows_consumed) == (True, True, 200)


def test_branch_with_exclusions_is_exact(arena: Arena) -> None:
    """A finished run is open again; the old spec resumes without the excluded rows, however often; the old branch stays."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)
    old = arena.train(spec)
    left = arena.head("r")
    before = {row.checkpoint_id for row in arena.rows("r", CheckpointRow)}
    done = rewind_run(arena.lakehouse, "r", nonce="op1", target=30, exclude=["row_id >= 1000"], why="a loss spike")
    assert (done.step, done.left, done.left_step, done.attempt) == (30, left, 63, 2)
    status = run_status(arena.lakehouse, "r")
    assert (status["state"], status["step"], status["excluded_by_rewinds"]) == ("open", 30, ["row_id >= 1000"])
    new = {step: rows for step, rows in old.items() if step <= 30}
    new |= {step: rows for step, rows in arena.train(spec, until=45).items() if step <= 40}
    new |= arena.train(spec)
    assert all(row < 1000 for step, rows in new.items() if step > 30 for row in rows)
    assert set(rows_until(new, 99)) == {*rows_until(old, 30), *range(1000)}
    assert len(rows_until(new, 99)) == len(set(rows_until(new, 99)))
    assert recorded(arena, "r") == rows_until(new, 99)
    assert recorded(arena, "r", left) == rows_until(old, 99) == list(range(2000))
    assert [row.step for row in arena.lineage("r", left)] == [10, 20, 30, 40, 50, 60, 63]
    assert [row.record["index"] for row in arena.rows("r", LegRow)] == [0, 1]
    now, then = audit_run(arena.lakehouse, "r"), audit_run(arena.lakehouse, "r", left)
    assert (now.exact, now.problems, now.finished, now.rows_consumed) == (True, (), True, len(rows_until(new, 99)))
    assert (then.exact, then.problems, then.finished, then.rows_consumed) == (True, (), True, 2000)
    assert now.checkpoints_abandoned == len(before) - 3
    with pytest.raises(errors.SpecInvalid, match=r"at step 40, found.*name one of these"):
        audit_run(arena.lakehouse, "r", "40")
    with pytest.raises(errors.NoSuchCheckpoint, match="found '7'"):
        audit_run(arena.lakehouse, "r", "7")
    with pytest.raises(errors.RunFinished):
        arena.train(spec)
    with open_audit(arena.lakehouse) as connection:
        branches = rows_of(connection, "SELECT * EXCLUDE (run) FROM branches WHERE run = 'r' ORDER BY branch")
    first, second = branches
    assert (first["begun_by"], first["head_checkpoint"], first["last_step"]) == ("start", left, 63)
    assert (first["surviving"], first["survives_to"], first["from_step"]) == (False, 30, None)
    assert (second["begun_by"], second["from_step"], second["first_step"]) == ("rewind", 30, 40)
    assert (second["surviving"], second["why"], second["grew_from"]) == (True, "a loss spike", done.checkpoint_id)


def test_useless_rewind_is_refused(arena: Arena) -> None:
    """A head as it is, a retired step, an expression that is none or does not fit, a damaged target: nothing is appended."""
    arena.table()
    arena.trained("r", world_size=1, passes=1, keep_last=3, until=45)
    before = arena.rows("r")

    def refused(error: type[Exception], said: str, **wish: object) -> None:
        with pytest.raises(error, match=said):
            rewind_run(arena.lakehouse, "r", nonce="op", **wish)  # type: ignore[arg-type]  # of any of its arguments
        assert arena.rows("r") == before

    refused(errors.SpecInvalid, "nothing to rewind", target=40)
    refused(errors.NoSuchCheckpoint, r"at step 10 that is kept, found those of steps \[20, 30, 40\]", target=10)
    columns = r"makes no sense .*columns of 'src.t' are \['row_id', 'x', 'even', 'name'\]"
    refused(errors.SpecInvalid, columns, target=20, exclude=["row_id !"])
    refused(errors.SpecInvalid, "expected rows to exclude", target=20, exclude=[" "])
    refused(
        errors.NoSuchColumn, r"one of the columns \['row_id', 'x', 'even', 'name'\]", target=20, exclude=["day > 3"]
    )
    sources = r"one of the sources \['src.t'\], found 'src.u'"
    refused(errors.SpecInvalid, sources, target=20, exclude=[("src.u", "even = true")])
    target = next(row for row in arena.rows("r", CheckpointRow) if row.step == 20)
    file = folder_of(target.manifest_uri) / "torch-state.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused(errors.CheckpointDamaged, "expected .* bytes in", target=20)
    file.write_bytes(content)
    with pytest.raises(errors.NoSuchRun, match="expected a run named 'missing'"):
        rewind_run(arena.lakehouse, "missing", nonce="op", target=20)
    rewind_run(arena.lakehouse, "r", nonce="op1", target=40, exclude=["even = true"])  # the head, but with less to read
    before = arena.rows("r")
    refused(errors.SpecInvalid, "nothing to rewind", target=40, exclude=["even = true"])


def test_rewind_is_one_fencing_append(arena: Arena) -> None:
    """Repeated it changes nothing; the attempt before it is refused; it is neither fruitless nor failed; pins stay needed."""
    arena.table()
    spec = arena.trained("r", world_size=1, passes=1, until=35)
    old = Ledger(arena.lakehouse).state("r").fence
    done = [rewind_run(arena.lakehouse, "r", nonce="op", target=20) for _ in range(2)]
    assert done[0] == done[1]
    rows = arena.rows("r")
    appended = [row for row in rows if row.seq > old.seq]
    assert [(row.kind, row.attempt, row.nonce) for row in appended] == [("claim", 2, "op"), ("rewind", 2, "op")]
    assert {row.head_after for row in appended} == {done[0].checkpoint_id}
    attempt, late = Attempt(run="r", number=1, nonce=old.nonce), CheckpointRow(checkpoint_id="late", parent=old.head)
    with pytest.raises(errors.Fenced, match="owned by attempt 2"):
        commit_checkpoint(Ledger(arena.lakehouse), attempt, checkpoint_id="late", parent=old.head, rows=[late])
    assert attempts_without_progress(rows) == 0
    assert launcher_of(rows, 2) == ""
    assert failure_of_attempt(rows, 2, noticed_by="test", noticed_at=0.0, launched_at=0.0, stopped_at=0.0) is None
    arena.train(spec, until=25)
    assert attempts_without_progress(arena.rows("r")) == 1
    arena.train(spec, until=25)
    failures = Failures.of_rows(arena.rows("r"))
    assert failures.count == 1, "of the attempts 1, 3 and 4: the first was ended, the last is not over"
    (pin,) = list_pins(arena.lakehouse, "src.t")
    assert pin.needed_by == ("r",)
    with arena.lakehouse.own("consumption").transaction() as transaction:
        transaction.remove_properties("dlac.fence.r")
    assert not Ledger(arena.lakehouse).state("r").finished


def test_rows_seen_in_part_are_counted(arena: Arena) -> None:
    """A row whose first tokens were trained on has been seen."""
    rows = source_rows(0, 400)
    lists = pa.array([[row] * 7 for row in range(400)], pa.list_(pa.int32()))
    arena.lakehouse.catalog.create_table("src.t", rows.append_column("tokens", lists).schema)
    arena.lakehouse.load("src.t").append(rows.append_column("tokens", lists))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=3, batch_size=8, steps=9, columns=["tokens"])
    spec = JobSpec.model_validate({**spec.model_dump(), "sequences": {"length": 5}})
    seen: set[int] = set()
    with arena.training_run(spec) as run:
        run.restore(dlac_pipeline.TorchState(model=torch.nn.Linear(1, 1)))
        for batch in run.batches():
            if batch.step <= 6:
                seen |= set(batch["tokens"][batch["document"] > 0].tolist())
            run.step_done(0.0)
    done = rewind_run(arena.lakehouse, "r", nonce="op", target=6, exclude=["row_id < 399"])
    assert done.excluded_rows_seen == len(seen - {399})
    assert done.clean_step == 0


@pytest.mark.slow
def test_spec_beyond_rewind_is_refused(arena: Arena) -> None:
    """What rewinds exclude needs no new leg; anything else is still refused by name."""
    arena.table()
    arena.train(arena.spec("r", world_size=1, passes=1), until=25)
    rewind_run(arena.lakehouse, "r", nonce="op", target=10, exclude=["even = true"])
    with pytest.raises(
        errors.ResumeMismatch, match=r"exclude: committed .'even = true',., asked for .'row_id = 3', 'even = true'."
    ):
        arena.train(arena.spec("r", world_size=1, passes=1, exclude=["row_id = 3"]))
    seen = arena.train(arena.spec("r", world_size=1, passes=1, exclude=["row_id = 3"], new_leg=True))
    assert {row % 2 for rows in seen.values() for row in rows} == {1}
    assert 3 not in {row for rows in seen.values() for row in rows}
    assert audit_run(arena.lakehouse, "r").exact


@pytest.mark.soak
def test_mixture_excludes_named_source_rows(arena: Arena) -> None:
    """A rewind without a name, or one that leaves nothing of an endless source, is refused. Other sources are read as before."""
    arena.table(appends=(500,))
    arena.table("src.u", appends=(200,))
    more = {"table": "src.u", "columns": ["row_id", "x"], "passes": 0}
    raw = arena.spec("r", world_size=1, passes=1, every_steps=3).model_dump()
    spec = JobSpec.model_validate({**raw, "mixture": [more]})
    arena.train(spec, until=8)
    for error, said, wish in (
        (errors.SpecInvalid, r"--source one of \['src.t', 'src.u'\]", "row_id >= 0"),
        (errors.EmptyPlan, "read again and again", ("src.u", "row_id >= 0")),
    ):
        with pytest.raises(error, match=said):
            rewind_run(arena.lakehouse, "r", nonce="op", target=3, exclude=[wish])
    done = rewind_run(arena.lakehouse, "r", nonce="op", target=3, exclude=[("src.u", "even = true")])
    with open_audit(arena.lakehouse, run="r") as connection:
        question = "SELECT count(*) FROM consumed_rows WHERE source = 1 AND row % 2 = 0"
        assert connection.execute(question).fetchall() == [(done.excluded_rows_seen,)]
    arena.train(spec, until=15)
    with open_audit(arena.lakehouse, run="r") as connection:
        seen = rows_of(
            connection,
            "SELECT a.source, sum(a.rows_consumed)::INTEGER AS rows, bool_or(p.base_plan_id IS NOT NULL) AS excluding "
            "FROM advances AS a JOIN plans AS p USING (plan_id) WHERE a.first_step > 3 GROUP BY ALL ORDER BY a.source",
        )
    assert [(row["source"], row["excluding"]) for row in seen] == [(0, False), (1, True)]
    assert all(row["rows"] > 0 for row in seen)
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems) == (True, ())


@pytest.mark.soak
def test_abandoned_checkpoints_stay_until_retired(arena: Arena, here: Command) -> None:
    """The target ages with its new branch. The abandoned branch stays and is listed until `dlac checkpoint retire` removes it."""
    arena.table()
    spec = arena.trained("r", world_size=1, passes=1, keep_last=2, until=55)
    left = arena.head("r")
    said = here("rewind", "r", "--to-step", "40", "--spec", str(arena.home / "r.yaml"), home=arena.home)
    assert said.returncode == 0, said.stderr
    assert "Attempts before 2 are fenced off" in said.stdout
    arena.train(spec, until=55)
    states = [(each.step, each.state) for each in list_checkpoints(arena.lakehouse, "r")]
    assert states[3:] == [(40, "kept"), (50, "left"), (50, "head")]
    arena.train(spec)
    states = [(each.step, each.state) for each in list_checkpoints(arena.lakehouse, "r")]
    assert states[3:] == [(40, "retired"), (50, "left"), (50, "retired"), (60, "kept"), (63, "head")]
    row = next(row for row in arena.rows("r", CheckpointRow) if row.checkpoint_id == left)
    assert folder_of(row.manifest_uri).is_dir()
    with pytest.raises(errors.SpecInvalid, match="on an abandoned branch and without a name, found '60'"):
        retire_left(Ledger(arena.lakehouse), "r", "60")
    said = here("checkpoint", "retire", "r", "--spec", str(arena.home / "r.yaml"), home=arena.home)
    assert f"retired {left} (step 50)" in said.stdout
    assert retire_left(Ledger(arena.lakehouse), "r") == []
    assert not folder_of(row.manifest_uri).exists()
    shown = here("audit", "r", "--checkpoint", left or "", "--json", home=arena.home)
    assert (shown.returncode, json.loads(shown.stdout)["exact"]) == (0, True)
    assert audit_run(arena.lakehouse, "r").exact
    with pytest.raises(errors.NoSuchCheckpoint, match="that is kept"):
        rewind_run(arena.lakehouse, "r", nonce="op", target=left or "")
    assert [row.kind for row in arena.rows("r", *HEAD_KINDS) if isinstance(row, RewindRow)] == ["rewind"]


@pytest.mark.soak
def test_damaged_lineage_names_other_branches(arena: Arena) -> None:
    """The error for a damaged lineage names the heads of other branches, at each start. A rewind to one resumes after it."""
    arena.table()
    spec = arena.trained("r", world_size=1, passes=1, until=35)
    left = str(arena.head("r"))
    rewind_run(arena.lakehouse, "r", nonce="op1", target=10, exclude=["row_id >= 1900"])
    arena.train(spec, until=25)
    for row in arena.lineage("r"):
        path = folder_of(row.manifest_uri) / "torch-state.pt"
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(
            errors.NoRestorableCheckpoint, match=rf"{left} \(step 30\).*`dlac rewind r --checkpoint ID`"
        ):
            arena.train(spec)
    rewind_run(arena.lakehouse, "r", nonce="op2", target=left or "")
    assert exclusions_in_force(arena.rows("r")) == ()
    assert min(arena.train(spec)) == 31
    assert audit_run(arena.lakehouse, "r").exact


@pytest.mark.slow
def test_rewind_to_step_zero(arena: Arena) -> None:
    """A finished run begins again as a new branch, on the snapshot it began with; the old branch stays auditable."""
    table = arena.table(appends=(500, 300))
    spec = arena.spec("r", world_size=1, passes=1)
    old = arena.train(spec)
    left = arena.head("r")
    table.append(source_rows(800, 100))
    done = rewind_run(arena.lakehouse, "r", nonce="op1", target=0, why="from scratch")
    assert (done.checkpoint_id, done.step, done.left) == (None, 0, left)
    assert rewind_run(arena.lakehouse, "r", nonce="op1", target=0) == done
    assert run_status(arena.lakehouse, "r")["step"] == 0
    assert audit_run(arena.lakehouse, "r").exact
    with pytest.raises(errors.SpecInvalid, match="its beginning"):
        rewind_run(arena.lakehouse, "r", nonce="op2", target=0)
    arena.train(spec, until=15)  # twice: the second attempt resumes the branch
    new = arena.train(spec)
    assert recorded(arena, "r") == recorded(arena, "r", left) == list(range(800))
    assert new == {step: rows for step, rows in old.items() if step in new}
    for checkpoint in (None, left):
        report = audit_run(arena.lakehouse, "r", checkpoint)
        assert (report.exact, report.finished) == (True, True)
    assert {each.state for each in list_checkpoints(arena.lakehouse, "r") if each.checkpoint_id in {left}} == {"left"}
    rewind_run(arena.lakehouse, "r", nonce="op3", target=left or "")
    assert arena.head("r") == left


def test_damaged_run_begins_again(arena: Arena, here: Command) -> None:
    """Its only checkpoint is damaged: training is refused with the command that begins it again, which then does so, once."""
    arena.table(appends=(200,))
    spec = arena.trained("r", world_size=1, passes=1, every_steps=2, until=4)
    (row,) = arena.lineage("r")
    (folder_of(row.manifest_uri) / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(
            errors.NoRestorableCheckpoint, match=r"begin it again with `dlac rewind r --to-step 0`, or start a run"
        ):
            arena.train(spec)
    shown = here("rewind", "r", "--to-step", "0", home=arena.home)
    assert "r begins again (step 0). It had no checkpoint that can be restored" in shown.stdout, shown.stderr
    with pytest.raises(errors.SpecInvalid, match="its beginning"):
        rewind_run(arena.lakehouse, "r", nonce="op2", target=0)
    assert min(arena.train(spec)) == 1
    assert recorded(arena, "r") == list(range(200))
    assert audit_run(arena.lakehouse, "r").exact


def test_rewind_to_step_zero_refused(arena: Arena) -> None:
    """Where no row is left, or nothing is committed. An older launch is fenced off, and retention spares the old branch."""
    arena.table(appends=(200,))
    spec = arena.trained("r", world_size=1, passes=1, every_steps=2, keep_last=1, until=1)
    with pytest.raises(errors.SpecInvalid, match="at its beginning"):
        rewind_run(arena.lakehouse, "r", nonce="op0", target=0)
    arena.train(spec, until=6)
    left = arena.head("r") or ""
    with pytest.raises(errors.EmptyPlan, match="leaves none: exclude fewer rows"):
        rewind_run(arena.lakehouse, "r", nonce="op1", target=0, exclude=["row_id >= 0"])
    attempt = arena.rows("r", ClaimRow)[-1]
    rewind_run(arena.lakehouse, "r", nonce="op2", target=0, exclude=["row_id < 20"])
    stale = Attempt(run="r", number=attempt.attempt, nonce=attempt.nonce)
    with pytest.raises(errors.Fenced):
        commit_checkpoint(Ledger(arena.lakehouse), stale, checkpoint_id="x", parent=left, rows=[])
    arena.train(spec)
    assert folder_of({row.checkpoint_id: row for row in arena.rows("r", CheckpointRow)}[left].manifest_uri).exists()
    assert recorded(arena, "r") == list(range(20, 200))
    assert audit_run(arena.lakehouse, "r").exact


def following(arena: Arena) -> JobSpec:
    """A run that follows its table, with a checkpoint every second step."""
    return arena.spec("r", world_size=1, follow="appends", passes=1, every_steps=2)


def rows_of_steps(steps: Steps) -> set[int]:
    """The row ids of all steps."""
    return {row for rows in steps.values() for row in rows}


@pytest.mark.slow
def test_exclusion_follows_renamed_column(arena: Arena) -> None:
    """Rows that come under the new name are excluded as well, and a rewind can name either."""
    table = arena.table(appends=(128,))
    spec = following(arena)
    arena.train(spec, until=4)
    rewind_run(arena.lakehouse, "r", nonce="op1", target=2, exclude=["even = true"])
    with table.update_schema() as update:
        update.rename_column("even", "is_even")
    new = source_rows(128, 128)
    arena.lakehouse.load("src.t").append(new.rename_columns([*new.column_names[:2], "is_even", *new.column_names[3:]]))
    seen = rows_of_steps(arena.train(spec))
    assert {row % 2 for row in seen} == {1}
    assert len([row for row in seen if row >= 128]) >= 32
    rewind_run(arena.lakehouse, "r", nonce="op2", target=2, exclude=["even = true", "is_even = false and row_id < 200"])
    seen = rows_of_steps(arena.train(spec))
    assert all(row % 2 and row >= 200 for row in seen)
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems) == (True, ())


@pytest.mark.slow
def test_rewind_past_unknown_rows_is_refused(arena: Arena) -> None:
    """Where every launch would fail because the history of appends is lost, nothing is written."""
    arena.table(appends=(128,))
    spec = following(arena)
    arena.train(spec)
    append(arena, 128, 64)
    rewrite(arena, but_first=10)
    before = arena.rows("r")
    with pytest.raises(errors.AppendHistoryLost):
        rewind_run(arena.lakehouse, "r", nonce="op", target=2, spec=spec)
    assert arena.rows("r") == before
    with pytest.raises(errors.AppendHistoryLost):
        arena.train(spec)
    assert arena.rows("r") == before
    lenient = spec.model_copy(update={"source": spec.source.model_copy(update={"on_overwrite": "read"})})
    assert rewind_run(arena.lakehouse, "r", nonce="op", target=2, spec=lenient).step == 2
    arena.train(lenient)
