"""`dlac spike`: the spikes of a run, the rows of a step by their loss, and the rewind that excludes the worst."""

import json
import runpy
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.replay.spike import SpikeReport, explain_spike
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.errors import LossSpiked, NothingToRehearse, ScriptInvalid, SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import Columns, QuarantinedRowsRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, source_rows
from tests.fixtures import Command
from tests.integration.audit_runs import Workshop, rows_named, trained

BAD = (333, 777)
"""Rows with values that make the loss jump."""
PACKED = """
import os, torch, dlac_pipeline as dlac
with dlac.training_run(os.environ.get("JOB_SPEC")) as run:
    model = torch.nn.Linear(1, 1)
    run.restore(dlac.TorchState(model=model))
    for batch in run.batches():
        rows = batch["tokens"].double()
        measure = batch.token_mean(-rows)
        loss = batch.token_mean(rows * ("flat" not in run.spec.params) + 0 * model(torch.ones(1)).sum())
        run.step_done(loss)
"""
"""A script whose loss of each token is its number, and that takes the mean of a measure as well."""


def add_table(arena: Arena, *bad: int) -> None:
    """Make a table of (row_id, x, doc's) whose `bad` rows have huge values."""
    rows = source_rows(0, 1280)
    x = np.stack(rows["x"].to_numpy())
    x[list(bad)] *= 300
    rows = rows.set_column(1, "x", pa.array(list(x), type=pa.list_(pa.float32())))
    rows = rows.append_column("doc's", pa.array([f"it's {row_id}" for row_id in range(len(rows))]))
    arena.lakehouse.catalog.create_table("src.t", rows.schema, properties={"write.parquet.row-group-limit": "50"})
    arena.lakehouse.load("src.t").append(rows)


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A lakehouse with "r", a finished run of two ranks and 40 steps. Two of its steps have a bad row."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Arena(tmp_path_factory.mktemp("spiky") / "home", monkeypatch)
        add_table(arena, *BAD)
        arena.launched(arena.spec("r", passes=1, identity_columns=["doc's"]))
        yield arena
        arena.close()


def step_of(arena: Arena, row_id: int) -> int:
    """Return the step whose tensors had a row."""
    return next(step for step, rows in arena.journal("r").items() if row_id in rows)


@pytest.mark.slow
def test_bad_row_is_ranked_first(spiky: Arena, here: Command) -> None:
    """The largest spike is replayed bit for bit, and its bad row alone is to blame. The printed command is a rewind."""
    step = step_of(spiky, 333)
    done = here("spike", "r", "--text", "row_id", "--top", "3", home=spiky.home)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"step {step}: loss {spiky.losses('r')[step - 1]:.6g}, after a median of ")
    assert lines[1:3] == [
        "replayed from the checkpoint of step 20: bit-identical",
        "without 1 of 32 rows (*) it would be no spike",
    ]
    assert lines[4].split()[1] == "*"
    assert [line.split()[-1] == "333" for line in lines[4:7]] == [True, False, False]
    command = shlex.split(lines[7])
    assert command[:7] == ["dlac", "rewind", "r", "--to-step", "20", "--exclude", "\"doc's\" = 'it''s 333'"]
    assert command[7:] == ["--home", str(spiky.home)]


@pytest.mark.slow
def test_early_step_is_replayed_from_start(spiky: Arena, here: Command) -> None:
    """No checkpoint before the step is needed where the run began. Each sample has the loss that the model gave it."""
    step = step_of(spiky, 777)
    done = here("spike", "r", "--step", str(step), "--by", "row_id", "--text", "row_id", "--json", home=spiky.home)
    report = json.loads(done.stdout)
    assert (report["step"], report["replayed_from"], report["identical"]) == (step, 0, True)
    assert report["rows"][0]["value"] == 777
    assert shlex.split(report["rewinds"][0])[-3:] == ["0", "--exclude", "row_id = 777"]
    assert [each["step"] for each in report["others"]] == [step_of(spiky, 333)]
    losses = [each["loss"] for each in report["rows"]]
    assert losses == sorted(losses, reverse=True)


def test_bad_steps_are_refused(workshop: Workshop) -> None:
    """A step that does not exist, a run without a spike, and a step without a kept checkpoint before."""
    run = trained(workshop, "mixed")
    with pytest.raises(SpecInvalid, match=r"1 to \d+, found 0"):
        explain_spike(workshop.lakehouse, run, step=0)

    def retired(rows: list[Columns]) -> list[Columns]:
        last = max(rows, key=lambda row: row["seq"])
        early = [row for row in rows_named(rows, "checkpoint") if row["step"] <= 32]
        return rows + [{**last, "kind": "retire", "checkpoint_id": row["checkpoint_id"]} for row in early]

    with pytest.raises(NothingToRehearse, match="steps 28 to 33 that is kept"):
        explain_spike(workshop.lakehouse, workshop.forge(retired, of=run), step=34)
    with pytest.raises(SpecInvalid, match="expected a spike among the"):
        explain_spike(workshop.lakehouse, run)
    steps = StepRows(workshop.lakehouse, run).steps
    assert set(steps.losses()) == set(range(1, steps.last + 1)) - {3, 5}


@pytest.mark.slow
def test_spike_stops_run(spiky: Arena, here: Command) -> None:
    """No checkpoint has the step, also after a restart, by losses of the ledger. The printed commands lead on without the row."""
    step, spec = step_of(spiky, 333), spiky.spec("s", passes=1, on_spike="stop", identity_columns=["doc's"])
    for _ in range(2):
        launch = spiky.launch(spec)
        assert launch.wait() == LossSpiked.exit_code, launch.stderr
        assert len(launch.of("attempt")) == 1
        assert f"`dlac spike s --step {step}`" in run_status(spiky.lakehouse, "s")["gave_up"]
        assert spiky.lineage("s")[-1].step == 20 == step // 10 * 10 - 10
    done = here("spike", "s", "--step", str(step), "--json", home=spiky.home)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["replayed_from"], report["recorded"], report["to_blame"]) == (20, None, 1)
    assert report["replayed"] == spiky.losses("r")[step - 1]
    with pytest.raises(SpecInvalid, match="1 to 20, found 99"):
        explain_spike(spiky.lakehouse, "s", step=99)
    [command] = report["rewinds"]
    rewound = here(*shlex.split(command)[1:], "--json", home=spiky.home)
    assert rewound.returncode == 0, rewound.stderr
    assert (json.loads(rewound.stdout)["step"], json.loads(rewound.stdout)["excluded_rows_seen"]) == (20, 0)
    spiky.launched(spec)
    trained_rows = [row for rows in spiky.journal("s").values() for row in rows]
    assert sorted(trained_rows) == [row for row in range(1280) if row != 333]
    [later] = explain_spike(spiky.lakehouse, "s", step=25).rewinds  # another row of the same checkpoint
    assert [shlex.split(later).count(word) for word in ("--exclude", f"{shlex.split(command)[-1]}")] == [2, 1]


@pytest.mark.slow
def test_spike_rows_are_excluded(spiky: Arena) -> None:
    """The next attempt leaves the bad row alone out, and the audit of the run is exact."""
    launch = spiky.launched(spiky.spec("e", passes=1, on_spike="exclude"))
    [left_out] = launch.of("quarantine")
    assert (left_out["step"], left_out["rows"], left_out["tentative"]) == (step_of(spiky, 333), 1, True)
    assert len(launch.of("attempt")) == 2
    trained_rows = [row for rows in spiky.journal("e").values() for row in rows]
    assert sorted(trained_rows) == [row for row in range(1280) if row != 333]
    assert audit_run(spiky.lakehouse, "e").exact
    with open_audit(spiky.lakehouse) as connection:
        [unit] = rows_of(connection, "FROM quarantined_units WHERE run = 'e'", [])
    assert unit["rows"] == 1
    assert "by 1 of its samples" in unit["reason"]


ODD_SLOTS = """
import torch, dlac_pipeline as dlac
with dlac.training_run() as run:
    model = torch.nn.Linear(1, 1)
    run.restore(dlac.TorchState(model=model))
    for batch in run.batches():
        losses = torch.ones(len(batch.valid)) + 0 * model(torch.ones(1)).sum()
        losses = losses * 50 if batch.step == 15 else losses
        losses[3] += 1000 * (batch.step == 25)
        run.step_done(batch.mean(losses))
"""
"""A script whose losses jump in all samples of step 15, and in one of step 25, whatever its rows."""


@pytest.mark.soak
def test_innocent_rows_are_trained_through(spiky: Arena) -> None:
    """A step with bad samples only is trained at once, one that stays bad without the blamed rows in its second attempt."""
    script = spiky.home / "odd.py"
    script.write_text(ODD_SLOTS)
    spec = spiky.spec("o", passes=1, on_spike="exclude", world_size=1)
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"script": str(script)})})
    launch = spiky.launched(spec)
    assert len(launch.of("attempt")) == 2
    assert [(each["step"], each["rows"]) for each in launch.of("quarantine")] == [(25, 1)]
    warnings = [each["message"] for each in launch.of("warning") if "deviations" in each["message"]]
    assert ["no few rows" in each for each in warnings] == [True, False]
    assert len(spiky.losses("o")) == 40


def packed_spec(arena: Arena, length: int, *, bad: int = 0, **changes: Any) -> JobSpec:
    """Return the spec of a packed run of one rank. Each token is the number of its row, or huge in a `bad` one."""
    ids = list(range(1, 301))
    tokens = [[10**7 if each == bad else each] * (each * 7 % 23) for each in ids]
    table = pa.table({"row_id": pa.array(ids), "tokens": pa.array(tokens, pa.list_(pa.int32()))})
    arena.lakehouse.catalog.create_table("src.d", table.schema)
    arena.lakehouse.load("src.d").append(table)
    script = arena.home / "packed.py"
    script.write_text(PACKED)
    shape: dict[str, Any] = {"batch_size": 8, "passes": 1, "every_steps": 4, "world_size": 1}
    spec = arena.spec("p", table="src.d", columns=["tokens"], **shape, **changes)
    launch = spec.launch.model_copy(update={"script": str(script)})
    sequences = spec.sequences.model_copy(update={"length": length})
    return spec.model_copy(update={"sequences": sequences, "launch": launch})


def packed_report(arena: Arena, spec: JobSpec) -> SpikeReport:
    """Rank the rows of step 6 of the packed run with a job spec."""
    return explain_spike(arena.lakehouse, "p", step=6, column="row_id", spec=spec)


@pytest.mark.slow
def test_packed_documents_have_own_losses(arena: Arena) -> None:
    """Each document has the mean over its tokens in the step, measures do not count, and a flat loss ranks nothing."""
    spec = packed_spec(arena, 32)
    (arena.home / "p.yaml").write_text(spec.model_dump_json())
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    arena.monkeypatch.setenv("JOB_SPEC", str(arena.home / "p.yaml"))
    runpy.run_path(spec.launch.script)
    report = packed_report(arena, spec)
    assert (report.identical, report.replayed_from) == (True, 4)
    assert [loss for loss, _ in report.rows] == [float(row.value) for _, row in report.rows]
    expected = StepRows(arena.lakehouse, "p", spec=spec).of(6, column="row_id")
    assert sorted(row.value for _, row in report.rows) == sorted(each.value for each in expected)
    assert len(expected) > 8
    assert (report.rewinds, "--by COLUMN" in report.unnamed) == ((), True)
    with pytest.raises(ScriptInvalid, match=r"batch\.mean\(loss_per_sample\)"):
        packed_report(arena, spec.model_copy(update={"params": {"flat": "yes"}}))


@pytest.mark.soak
def test_packed_rows_are_excluded(arena: Arena) -> None:
    """The bad document is left out, also where it is read from an earlier checkpoint on."""
    launch = arena.launched(packed_spec(arena, 8, bad=220, on_spike="exclude"))
    assert [each["rows"] for each in launch.of("quarantine")] == [1]
    [row] = arena.rows("p", QuarantinedRowsRow)
    assert list(row.positions) == [219]
    assert audit_run(arena.lakehouse, "p").exact
