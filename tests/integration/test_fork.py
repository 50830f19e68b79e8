"""A run that begins from a checkpoint of another one: it has its model, and has seen what that has seen."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch
import yaml

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.extensions.erasure.explain import explain_sql
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.extensions.kept_checkpoints.listing import verify_checkpoints
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, NoSuchCheckpoint, NoSuchRun, SpecInvalid
from dlac_pipeline.lakehouse.ledger.commits import names_of
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, ClaimRow, NameRow, RetireRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.fixtures import Command
from tests.integration.audit_runs import check_script_agrees
from tests.integration.test_cli import dlac as dlac_command

KILLED = """
import os, signal, sys
from pathlib import Path
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.checkpoint.commit import coordinator as committing
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.spec.job_spec import read_spec

spec = read_spec(Path(sys.argv[1]))
committing.commit_checkpoint = lambda *args, **rest: os.kill(os.getpid(), signal.SIGKILL)
fork_run(connect(spec.lakehouse), spec, sys.argv[2], step=int(sys.argv[3]))
"""


def checkpoint_at(arena: Arena, run: str, step: int) -> CheckpointRow:
    """The row of the surviving checkpoint at a step."""
    return next(row for row in arena.lineage(run) if row.step == step)


def weights_at_start(arena: Arena, spec: JobSpec) -> dict[str, torch.Tensor]:
    """What a launch of the run restores into a model that was initialized otherwise."""
    with arena.training_run(spec) as run:
        model = torch.nn.Linear(4, 1)
        run.restore(dlac.TorchState(model=model))
        return model.state_dict()


def names(arena: Arena, run: str) -> list[str]:
    """The names that checkpoints of a run have."""
    return sorted(names_of(arena.rows(run, NameRow)))


@pytest.mark.slow
def test_fork_inherits_model_and_consumption(arena: Arena, here: Command) -> None:
    """Through forks of forks, over other tables: rows before the forks are seen, later rows of the parents are not."""
    arena.table(appends=(500, 500))
    arena.table("src.u", appends=(200,))
    arena.table("src.v", appends=(200,))
    seen = arena.train(arena.spec("a", world_size=1, passes=1))
    weights = weights_at_start(arena, arena.spec("a2", world_size=1))  # made by the same seed; nothing changes it
    settings: dict[str, Any] = {"world_size": 1, "passes": 1, "every_steps": 3}
    second = arena.spec("b", table="src.u", seed=4, **settings)
    forked = fork_run(arena.lakehouse, second, "a", step=10)
    origin = checkpoint_at(arena, "a", 10)
    assert (forked.parent_checkpoint, forked.parent_step) == (origin.checkpoint_id, 10)
    (root,) = arena.lineage("b")
    assert (root.step, root.parent, root.model_digest) == (0, None, origin.model_digest)
    mine, theirs = (folder_of(row.manifest_uri) / "torch-state.pt" for row in (root, origin))
    assert mine.stat().st_ino == theirs.stat().st_ino
    started = weights_at_start(arena, second)
    assert all(torch.equal(started[name], weights[name]) for name in weights)
    seen_b = arena.train(second)
    third = arena.spec("c", table="src.v", seed=5, local=str(arena.home / "made here"), **settings)
    third = third.model_copy(
        update={"checkpoint": third.checkpoint.model_copy(update={"store": second.checkpoint.store})}
    )
    fork_run(arena.lakehouse, third, "b", step=3)
    copied = folder_of(checkpoint_at(arena, "c", 0).manifest_uri) / "torch-state.pt"
    assert copied.stat().st_nlink == 1, "the store's copy behind another local folder"
    arena.train(third)
    for run, parent in (("a", None), ("b", origin.checkpoint_id), ("c", checkpoint_at(arena, "b", 3).checkpoint_id)):
        report = audit_run(arena.lakehouse, run)
        assert (report.exact, report.problems, report.finished, report.forked_from) == (True, (), True, parent)
        assert names(arena, run) == []
        assert all(verdict.problem is None for verdict in verify_checkpoints(arena.lakehouse, run))
    assert "what its parent" in here("audit", "b", home=arena.home).stdout
    with open_audit(arena.lakehouse) as connection:
        wanted = {
            ("t", "a"): {row for rows in seen.values() for row in rows},
            ("t", "b"): {row for step, rows in seen.items() if step <= 10 for row in rows},
            ("t", "c"): {row for step, rows in seen.items() if step <= 10 for row in rows},
            ("u", "b"): {row for rows in seen_b.values() for row in rows},
            ("u", "c"): {row for step, rows in seen_b.items() if step <= 3 for row in rows},
            ("v", "c"): set(range(200)),
            ("u", "a"): set(),
            ("v", "b"): set(),
        }
        for (table, run), rows in wanted.items():
            for macro in ("consumed", "touched"):
                assert rows_seen(arena, connection, macro, table, arena.head(run) or "") == rows, (table, run, macro)
        begun = rows_of(connection, "SELECT run, begun_by, grew_from, from_step FROM branches ORDER BY run")
    assert [(row["begun_by"], row["from_step"]) for row in begun] == [("start", None), ("fork", 10), ("fork", 3)]
    check_script_agrees(arena.lakehouse, "c")
    script = explain_sql(arena.lakehouse, "c")
    with duckdb.connect() as plain:
        plain.execute(script)
        assert rows_seen(arena, plain, "consumed", "t", arena.head("c") or "") == wanted["t", "c"]


def rows_seen(arena: Arena, connection: duckdb.DuckDBPyConnection, macro: str, table: str, checkpoint: str) -> set[int]:
    """Return the row ids of a table that the checkpoint has seen by `macro`."""
    found = connection.execute(
        "SELECT row_id FROM read_parquet("
        f"'{arena.home}/warehouse/src/{table}/data/*.parquet', filename = true, file_row_number = true) "
        f"WHERE {macro}(filename, file_row_number, $1)",
        [checkpoint],
    )
    return {row_id for (row_id,) in found.fetchall()}


def test_forks_that_cannot_be_are_refused(arena: Arena) -> None:
    """A retired step, a name that is taken, a parent that is none, or a damaged one: no run begins, nothing is held."""
    arena.table(appends=(128,))
    arena.train(arena.spec("a", world_size=1, passes=1, every_steps=1, keep_last=2))
    arena.train(arena.spec("b", world_size=1, passes=1), until=3)  # claimed, and without a checkpoint
    new = arena.spec("new", world_size=1, passes=1)
    before = arena.rows("a")

    def refused(error: type[Exception], said: str, spec: JobSpec, parent: str, **which: Any) -> None:
        with pytest.raises(error, match=said):
            fork_run(arena.lakehouse, spec, parent, **which)
        assert arena.rows("a", CheckpointRow, ClaimRow, RetireRow) == [
            row for row in before if isinstance(row, (CheckpointRow, ClaimRow, RetireRow))
        ]
        assert arena.rows("new", CheckpointRow) == []
        assert names(arena, "a") == []

    refused(NoSuchCheckpoint, r"at step 1 that is kept, found those of steps \[3, 4\]", new, "a", step=1)
    refused(NoSuchRun, "expected a run named 'nobody'", new, "nobody")
    refused(SpecInvalid, "no run named 'b' yet, found one with 0 checkpoints", arena.spec("b", world_size=1), "a")
    refused(SpecInvalid, "no run named 'a' yet, found one with 4 checkpoints", arena.spec("a", world_size=1), "a")
    assert arena.rows("new") == []
    file = folder_of(checkpoint_at(arena, "a", 3).manifest_uri) / "torch-state.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(CheckpointDamaged, "to have digest", new, "a", step=3)
    file.unlink()
    refused(CheckpointDamaged, "found none", new, "a", step=3)
    assert list((Path(new.checkpoint.store) / "new").glob("attempt-*/step-*")) == []


@pytest.mark.soak
def test_a_killed_fork_can_be_done_again(arena: Arena) -> None:
    """Its staged files are removed, its hold is released, and the run begins once."""
    arena.table(appends=(500, 500))
    arena.train(arena.spec("a", world_size=1, passes=1))
    spec = arena.spec("b", world_size=1, passes=1)
    path = arena.home / "b.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    program = arena.home / "killed.py"
    program.write_text(KILLED)
    arguments = [sys.executable, str(program), str(path), "a", "10"]
    died = subprocess.run(arguments, env={**os.environ}, capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert arena.rows("b", CheckpointRow) == []
    (staged,) = (Path(spec.checkpoint.store) / "b").glob("attempt-*/step-*")
    (hold,) = names(arena, "a")
    assert hold.startswith("fork:b:")
    said = dlac_command("fork", "a", "--as", "b", "--spec", str(path), "--step", "20", "--json", home=arena.home)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["parent_step"] == 20
    wait_until(lambda: not staged.exists(), what="the removal of what the killed fork had staged")
    assert [row.kind for row in arena.rows("b", *HEAD_KINDS)].count("fork") == 1
    assert names(arena, "a") == []
    name_checkpoint(Ledger(arena.lakehouse), "a", "fork:b:1234")  # as if it had been killed right behind its commit
    with pytest.raises(SpecInvalid, match="choose another name"):
        fork_run(arena.lakehouse, spec, "a", step=20)
    assert names(arena, "a") == []
    arena.train(spec)
    assert audit_run(arena.lakehouse, "b").exact
