"""Training on meshes: the rows of a step do not depend on the mesh, and a checkpoint of one is restored on any other."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import yaml

from dlac_pipeline import TorchState
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.errors import ScriptInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec, SequenceSpec, parse_spec
from tests.conftest import Arena, wait_until
from tests.ports import own_port

ROWS, LENGTH = 1600, 17


@pytest.fixture(scope="module")
def tokens(campaign: Arena) -> Arena:
    """The campaign's lakehouse with a table of token lists."""
    ids = np.random.default_rng(3).integers(0, 32, (ROWS, LENGTH)).astype(np.int32)
    rows = pa.table({"row_id": np.arange(ROWS), "tokens": pa.FixedSizeListArray.from_arrays(ids.reshape(-1), LENGTH)})
    rows = rows.set_column(1, "tokens", rows["tokens"].cast(pa.list_(pa.int32())))
    campaign.lakehouse.catalog.create_table(
        "src.meshed", rows.schema, properties={"write.parquet.row-group-limit": "60"}
    )
    campaign.lakehouse.load("src.meshed").append(rows)
    return campaign


def spec(arena: Arena, run: str, ranks: int, mesh: dict[str, int], *, shares: str = "each", **launch: Any) -> JobSpec:
    """Return the spec of a run on a mesh."""
    raw = {
        "run": run,
        "source": {"table": "src.meshed", "columns": ["row_id", "tokens"]},
        "order": {"batch_size": 16, "key_groups": 4, "seed": 5},
        "read": {"shares": shares},
        "checkpoint": {"every_steps": 5},
        "launch": {"script": str(arena.program("train_mesh.py")), "world_size": ranks, "mesh": mesh, **launch},
        "params": {"journal": str(arena.home / "journal"), "layers": "4"},
    }
    return parse_spec(raw, origin="the test").resolved(arena.home)


MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "pp": 2})


@pytest.fixture(scope="module")
def one_rank(tokens: Arena) -> Arena:
    """The lakehouse with a run of one rank."""
    tokens.launched(spec(tokens, "one-rank", 1, {}))
    return tokens


def test_pipeline_trains_every_row_once(tokens: Arena) -> None:
    """Two stages share one decoded batch. The last one dies, and no row is lost or repeated."""
    launch = tokens.launch(spec(tokens, "staged", 2, {"pp": 2}, shares="node"))
    launch.wait_for("checkpoint", 2)
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    assert launch.wait() == 0, launch.stderr
    assert audit_run(tokens.lakehouse, "staged").exact
    assert sorted(row for step in tokens.journal("staged").values() for row in step) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("shares", [pytest.param("each", marks=pytest.mark.soak), "node"])
def test_middle_stage_gets_no_values(tokens: Arena, shares: str) -> None:
    """Packed documents go through four stages. The whole node dies, and then a stage in the middle."""
    for run, ranks, mesh in (("packed-one", 1, {}), (f"packed-{shares}", 4, {"pp": 4})):
        job = packed(spec(tokens, run, ranks, mesh, shares=shares))
        if ranks == 1:
            if not tokens.lineage(run):
                tokens.launched(job)
            continue
        first = tokens.launch(job)
        first.wait_for("checkpoint", 1)
        first.destroy()
        second = tokens.launch(job)
        second.wait_for("checkpoint", 1)
        os.kill(second.ranks()[1].pid, signal.SIGKILL)
        assert second.wait() == 0, second.stderr
        assert audit_run(tokens.lakehouse, run).exact
        assert tokens.losses(run) == pytest.approx(tokens.losses("packed-one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [*(pytest.param({name: 2}, marks=pytest.mark.soak) for name in ("tp", "pp")), {"tp": 2, "pp": 2}],
    ids="+".join,
)
def test_dropout_resumes_to_the_last_bit(tokens: Arena, mesh: dict[str, int]) -> None:
    """Blocks with dropout that are computed again in the backward pass draw the same numbers after a death, of all and of one."""
    for run in (f"dropped-{'-'.join(mesh)}", f"calm-{'-'.join(mesh)}"):
        launch = tokens.launch(job := spec(tokens, run, 4, mesh, args=["--dropout"]))
        if run.startswith("dropped"):
            launch.wait_for("checkpoint", 2)
            os.kill(launch.ranks()[-1].pid, signal.SIGKILL)
            launch.wait_for("checkpoint", 4)
            launch.destroy()
            launch = tokens.launch(job)
        assert launch.wait() == 0, launch.stderr
    assert tokens.losses(f"dropped-{'-'.join(mesh)}") == tokens.losses(f"calm-{'-'.join(mesh)}")


@pytest.mark.slow
def test_script_under_torchrun_has_own_mesh(one_rank: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mesh that a script passes decides who reads the same share, also after torchrun and all ranks were killed."""
    job = spec(one_rank, "own-mesh", 4, {})
    file = one_rank.home / "own-mesh.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    monkeypatch.setenv("JOB_SPEC", str(file))
    monkeypatch.setenv("DLAC_HOME", str(one_rank.home))
    options = ["--standalone", "--nproc-per-node=4", str(one_rank.program("train_mesh.py")), "--own-mesh"]
    command = [str(Path(sys.executable).with_name("torchrun")), *options]
    with subprocess.Popen(command) as launcher:
        wait_until(lambda: len(one_rank.rows("own-mesh", CheckpointRow)) > 1, what="a checkpoint", pause_s=0.5)
        for each in (*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)):
            each.kill()
    assert subprocess.run(command, check=False, timeout=240).returncode == 0
    assert {(row.readers, row.world_size) for row in one_rank.lineage("own-mesh")} == {(2, 4)}
    assert one_rank.journal("own-mesh") == one_rank.journal("one-rank")
    assert one_rank.losses("own-mesh") == pytest.approx(one_rank.losses("one-rank"), rel=1e-5)


def packed(job: JobSpec) -> JobSpec:
    """Return the job with its tokens packed into sequences of another length."""
    source = job.source.model_copy(update={"columns": ["tokens"]})
    return job.model_copy(update={"source": source, "sequences": SequenceSpec(length=12)})


@pytest.mark.slow
def test_run_changes_its_mesh(one_rank: Arena) -> None:
    """A random rank dies in each launch, and the next has another mesh: rows and losses are those of one rank, on each rank."""
    tokens, chance = one_rank, random.Random(2)
    for number, mesh in enumerate(MESHES):
        launch = tokens.launch(spec(tokens, "meshed", 4, mesh, shares="node"))
        launch.wait_for("checkpoint", 1)
        os.kill(chance.choice(launch.ranks()).pid, signal.SIGKILL)
        launch.wait_for("checkpoint", 3)
        if number < len(MESHES) - 1:
            os.kill(launch.process.pid, signal.SIGTERM)
        assert launch.wait() == 0, launch.stderr
    assert tokens.journal("meshed") == tokens.journal("one-rank")
    assert tokens.losses("meshed") == pytest.approx(tokens.losses("one-rank"), rel=1e-5)
    assert audit_run(tokens.lakehouse, "meshed").exact
    assert {(row.readers, row.stages) for row in tokens.lineage("meshed")} == {(2, 1), (2, 2), (4, 0), (1, 2)}
    steps = StepRows(tokens.lakehouse, "meshed")
    staged = next(row.step for row in tokens.lineage("meshed") if (row.readers, row.stages) == (2, 2))
    journal = {entry["rank"]: entry["rows"] for entry in tokens.entries("meshed") if entry["step"] == staged}
    for rank in range(4):
        assert [row.value for row in steps.of(staged, rank=rank, column="row_id")] == journal[rank]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "waits"), [({"tp": 2}, False), ({"tp": 2, "pp": 2}, True)])
def test_lost_node_of_a_mesh(tokens: Arena, mesh: dict[str, int], waits: bool) -> None:
    """A node with whole replicas trains on alone. One with a part of a replica waits for another node."""
    run, place = f"nodes-{len(mesh)}", f"127.0.0.1:{own_port()}"
    nodes: dict[str, Any] = {"nodes": "1:2", "nproc_per_node": 2, "rendezvous": place}
    job = spec(tokens, run, 1, mesh, last_call_s=1, node_timeout_s=6, gather_timeout_s=90, **nodes)
    first, second = (tokens.launch(job) for _ in range(2))
    leader = first if first.wait_for("attempt") and "leader" not in first.of("attempt")[0] else second
    leader.wait_for("checkpoint", 2)
    lost, left = (second, first) if leader is first else (first, second)
    lost.destroy()
    left.wait_for("failure")
    if waits:
        tokens.launch(job)
    assert left.wait() == 0, left.stderr
    assert {row.world_size for row in tokens.lineage(run)} == ({4} if waits else {2, 4})
    assert audit_run(tokens.lakehouse, run).exact
    assert sorted(row for step in tokens.journal(run).values() for row in step) == list(range(ROWS))


BY_PROCESS = """
import os
import pyarrow as pa
import pyarrow.compute as pc

def moved(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index("row_id"), "row_id", pc.add(batch["row_id"], os.getpid()))
"""


def test_other_values_in_a_replica_are_named(tokens: Arena) -> None:
    """Ranks over which tensors are split have the same batch. A transform that asks which process it is in ends the run."""
    (tokens.home / "by_process.py").write_text(BY_PROCESS)
    job = spec(tokens, "unequal", 2, {"tp": 2})
    source = job.source.model_copy(update={"transform": str(tokens.home / "by_process.py:moved")})
    launch = tokens.launch(job.model_copy(update={"source": source}))
    assert launch.wait() == 64
    message = launch.of("error")[-1]["message"]
    assert "the same batch of step 1 on the ranks 0 and 1" in message
    assert "found other values in 'row_id': make the transform" in message
    assert "by_process.py:moved" in message


def test_only_early_stages_lack_a_loss(campaign: Arena) -> None:
    """A rank with the last stage, as every rank has without a pipeline, has a loss."""
    with campaign.training_run(campaign.spec("no-loss")) as run:
        run.restore(TorchState())
        next(run.batches())
        with pytest.raises(ScriptInvalid, match=r"expected a loss of step 1 from rank 0, found None: pass the loss"):
            run.step_done(None)


@pytest.mark.slow
def test_pipeline_engine_resumes_exactly(tokens: Arena) -> None:
    """DeepSpeed's pipeline of three stages loses a rank, and then continues with half of the replicas. Batches may be short."""
    if not tokens.lakehouse.catalog.table_exists("src.points"):
        tokens.table("src.points", appends=(300, 330), row_group_rows=40)
    jobs = [piped(tokens, run, ranks, pp) for run, ranks, pp in (("piped-one", 1, 1), ("piped", 6, 3), ("piped", 3, 3))]
    tokens.launched(jobs[0])
    wide = tokens.launch(jobs[1])
    wide.wait_for("checkpoint", 1)
    os.kill(wide.ranks()[2].pid, signal.SIGKILL)
    wide.wait_for("checkpoint", 3)
    wide.destroy()
    refused = tokens.launch(piped(tokens, "piped", 2, 2))
    refused.wait()
    assert "resume with launch.mesh.pp = 3" in refused.of("error")[-1]["message"]
    narrow = tokens.launch(jobs[2])
    assert narrow.wait() == 0, narrow.of("error")
    assert tokens.journal("piped") == tokens.journal("piped-one")
    assert tokens.losses("piped") == pytest.approx(tokens.losses("piped-one"), rel=1e-4)
    assert audit_run(tokens.lakehouse, "piped").exact


@pytest.mark.slow
def test_megatron_resumes_exactly(tokens: Arena) -> None:
    """Ranks that get their values from another one take part in each step. A rank dies, and then the number of replicas halves.

    Megatron wraps the iterator for its replays.
    """
    if not tokens.lakehouse.catalog.table_exists("src.points"):
        tokens.table("src.points", appends=(300, 330), row_group_rows=40)
    for run, ranks in (("cored-one", 2), ("cored", 4), ("cored", 2)):
        raw = piped(tokens, run, ranks, 1).model_dump()
        raw["launch"] |= {"script": str(tokens.program("train_megatron.py")), "mesh": {"tp": 2}}
        launch = tokens.launch(parse_spec(raw, origin="the test"))
        if ranks == 4:
            launch.wait_for("checkpoint", 1)
            os.kill(launch.ranks()[3].pid, signal.SIGKILL)
            launch.wait_for("checkpoint", 3)
            launch.destroy()
        else:
            assert launch.wait() == 0, launch.of("error")
    assert tokens.journal("cored") == tokens.journal("cored-one")
    assert tokens.losses("cored") == pytest.approx(tokens.losses("cored-one"), rel=1e-5)
    assert audit_run(tokens.lakehouse, "cored").exact


def piped(arena: Arena, run: str, ranks: int, stages: int) -> JobSpec:
    """Return the spec of a run of DeepSpeed's pipeline."""
    raw = spec(arena, run, ranks, {"pp": stages}).model_dump()
    raw["source"] |= {"table": "src.points", "columns": ["row_id", "x"]}
    raw["launch"]["script"] = str(arena.program("train_pipeline.py"))
    return parse_spec(raw, origin="the test")
