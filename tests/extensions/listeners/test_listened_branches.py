"""Listeners of runs that go back, are forked, and lose checkpoints, with the real libraries."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.extensions.listeners.events import AttemptStarted, ProgressMade
from dlac_pipeline.lakehouse.ledger.branches import left_by_rewinds
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena
from tests.extensions.listeners.listening import (
    Receiver,
    read_events,
    read_wandb_run,
    running_receiver,
    scrape,
    use_libraries,
    with_listeners,
)
from tests.integration.test_cli import dlac
from tests.integration.test_resuming import damage
from tests.ports import own_port

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which this process imports to read


@dataclass(frozen=True, kw_only=True)
class Branched:
    """A finished run with listeners, which a command took back, and a fork of it."""

    arena: Arena
    spec: JobSpec
    receiver: Receiver
    folder: Path
    after_rewind: list[dict[str, Any]]
    """Events that the recording listener had when the command was done."""

    def recorded(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind that the recording listener received."""
        return [each for each in read_events(self.folder / "events.jsonl") if each["kind"] == kind]

    def tracked(self) -> dict[str, tuple[Any, dict[int, list[float]]]]:
        """Return the name of each MLflow run -> the run, and its losses by step."""
        from mlflow import MlflowClient

        client = MlflowClient((self.folder / "mlruns").as_uri())
        experiment = client.get_experiment_by_name("tests")
        assert experiment is not None
        found = {}
        for run in client.search_runs([experiment.experiment_id]):
            losses: dict[int, list[float]] = {}
            for each in client.get_metric_history(run.info.run_id, "loss"):
                losses.setdefault(each.step, []).append(each.value)
            found[str(run.info.run_name)] = (run, losses)
        return found


def write_job(spec: JobSpec, folder: Path) -> str:
    """Write a spec to a file, and return its path."""
    path = folder / f"{spec.run}.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    return str(path)


@pytest.fixture(scope="module")
def branched(strangers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Branched]:
    """Train to step 63, go back to step 20 by a command, train again without rows, retire what was left, and fork."""
    folder = tmp_path_factory.mktemp("branched")
    chosen: dict[str, Any] = {"openlineage": {}, "mlflow": {"experiment": "tests"}, "prometheus": {}}
    chosen |= {"records": {"path": str(folder / "events.jsonl")}}
    with pytest.MonkeyPatch.context() as monkeypatch, running_receiver() as receiver:
        use_libraries(monkeypatch, receiver, folder)
        arena = Arena(folder / "home", monkeypatch)
        arena.table()
        spec = with_listeners(arena.spec("r", world_size=1, passes=1), **chosen)
        job = write_job(spec, folder)
        arena.train(spec)
        excluded = ("--exclude", "row_id >= 1800", "--why", "bad rows")
        done = dlac("rewind", "r", "--to-step", "20", *excluded, "--spec", job, home=arena.home)
        assert done.returncode == 0, done.stderr
        after_rewind = read_events(folder / "events.jsonl")
        arena.train(spec)
        done = dlac("checkpoint", "retire", "r", "--checkpoint", "63", "--spec", job, home=arena.home)
        assert done.returncode == 0, done.stderr
        fork_run(arena.lakehouse, spec.model_copy(update={"run": "child"}), "r", step=20)
        yield Branched(arena=arena, spec=spec, receiver=receiver, folder=folder, after_rewind=after_rewind)
        arena.close()


@pytest.mark.slow
def test_commands_send_branch_events(branched: Branched) -> None:
    """The rewind, the retirement and the fork are events of the commands. The next launch repeats the rewind."""
    assert [each["kind"] for each in branched.after_rewind][-2:] == ["WentBack", "closed"]
    first, again = branched.recorded("WentBack")
    assert first == again
    rows = branched.arena.rows("r", *HEAD_KINDS)
    assert {each["checkpoint_id"] for each in first["abandoned"]} == left_by_rewinds(rows)
    facts = {name: first[name] for name in ("cause", "reason", "branch", "step", "left_step", "attempt")}
    assert facts == {"cause": "rewind", "reason": "bad rows", "branch": 2, "step": 20, "left_step": 63, "attempt": 2}
    assert [each["rows_by_table"] for each in first["attempts"]] == [{"src.t": 640}]
    (retired,) = branched.recorded("CheckpointsRetired")
    assert [each["step"] for each in retired["checkpoints"]] == [63]
    (begun,) = branched.recorded("RunBegun")
    assert (begun["run"], begun["parent_run"], begun["origin_step"]) == ("child", "r", 20)


@pytest.mark.slow
def test_mlflow_has_run_per_branch(branched: Branched) -> None:
    """Each branch has an MLflow run with one loss for a step, the whole curve of its lineage. The left one is tagged so."""
    tracked = branched.tracked()
    old, old_losses = tracked["r"]
    new, new_losses = tracked["r (branch 2)"]
    left = branched.recorded("WentBack")[0]["abandoned"][0]["checkpoint_id"]
    arena = branched.arena
    for losses, head in ((old_losses, left), (new_losses, None)):
        assert losses == {step: [loss] for step, loss in enumerate(arena.losses("r", head), 1)}
    tags = old.data.tags
    assert (tags["dlac.state"], tags["dlac.abandoned_after_step"]) == ("abandoned", "20")
    assert (tags["dlac.abandoned_because"], tags["dlac.retired_checkpoint_id"]) == ("rewind: bad rows", left)
    assert (new.data.tags["dlac.state"], new.data.tags["dlac.branch"], new.info.status) == ("current", "2", "FINISHED")
    child, _ = tracked["child"]
    assert (child.data.tags["dlac.parent_run"], child.info.status) == ("r", "SCHEDULED")


@pytest.mark.slow
def test_openlineage_counts_surviving_rows(branched: Branched) -> None:
    """The last counts of all attempts add up to the rows that survive. The outputs are the surviving checkpoints."""
    events = [each for each in branched.receiver.read_json("/api/v1/lineage") if each["job"]["name"] == "r"]
    counts: dict[str, int] = {}
    outputs: dict[str, bool] = {}
    for each in events:
        for table in each["inputs"]:
            counts[each["run"]["runId"]] = table["inputFacets"]["inputStatistics"]["rowCount"]
        for output in each["outputs"]:
            facets = output["facets"]
            life = facets.get("lifecycleStateChange", {"lifecycleStateChange": "CREATE"})["lifecycleStateChange"]
            outputs[facets["version"]["datasetVersion"]] = life == "CREATE"
    lineage = branched.arena.lineage("r")
    assert sum(counts.values()) == sum(len(rows) for rows in branched.arena.recorded("r").values())
    assert {name for name, stays in outputs.items() if stays} == {row.checkpoint_id for row in lineage}
    assert len(outputs) == len(branched.arena.rows("r", CheckpointRow))


@pytest.mark.slow
def test_launch_reports_unheard_move(arena: Arena, strangers: None, tmp_path: Path) -> None:
    """A damaged checkpoint reaches the listeners of the next launch."""
    arena.monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    arena.monkeypatch.setenv("WANDB_MODE", "offline")
    arena.table()
    records = {"path": str(tmp_path / "events.jsonl")}
    spec = with_listeners(arena.spec("r", world_size=1, passes=1), wandb={}, records=records)
    arena.train(spec, until=45)
    damage(arena.lineage("r")[-1], "truncated")
    arena.train(spec)
    events = [each for each in read_events(tmp_path / "events.jsonl") if each["kind"] in ("WentBack", "AttemptStarted")]
    assert [each["kind"] for each in events] == ["AttemptStarted", "WentBack", "AttemptStarted"]
    first, back, second = events
    assert [each["step"] for each in back["abandoned"]] == [40]
    assert (back["cause"], back["step"], back["attempts"][0]["rows_by_table"]) == ("damaged", 30, {"src.t": 960})
    assert (first["branch"], second["branch"], second["step"]) == (1, 2, 30)
    found = [read_wandb_run(path) for path in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))]
    old, new = (each for each in found if each.losses)
    assert new.losses == {step: [loss] for step, loss in enumerate(arena.losses("r"), 1)}
    assert (old.name, new.name, max(old.losses)) == ("r", "r (branch 2)", 40)
    (note,) = (each.summary for each in found if "abandoned_after_step" in each.summary)
    assert (note["state"], note["abandoned_after_step"]) == ("abandoned", 30)


@pytest.mark.slow
def test_endpoint_forgets_failed_attempt(arena: Arena) -> None:
    """A restart replaces the rows at risk of the attempt before, and removes its loss and rates until there are new ones."""
    from dlac_pipeline.extensions.listeners.prometheus import PrometheusListener

    port = own_port()
    facts: dict[str, Any] = {"run": "r", "at": 0.0, "attempt": 1}
    start: dict[str, Any] = {"ledger": "u", "tables": (), "world_size": 1, "nodes": 1, "parent_run": "", "branch": 1}
    start |= {"step": 10, "resumed_from": "c", "branch_is_new": False, "rows_at_risk": 0}
    listener = PrometheusListener(arena.spec("r"), host="127.0.0.1", port=port)
    losses: dict[str, Any] = {"step": 14, "loss_step": 12, "loss": 0.5, "tokens_per_s": None}
    listener.on_event(ProgressMade(**facts, **losses, rows=128, rows_at_risk=128, rows_per_s=9.0))
    running = scrape(port)
    listener.on_event(AttemptStarted(**{**facts, "attempt": 2}, **start))
    restarted = scrape(port)
    listener.close()
    for line in ('dlac_loss_step{run="r"} 12.0', 'dlac_loss{run="r"} 0.5', 'dlac_rows_at_risk{run="r"} 128.0'):
        assert line in running
    assert 'dlac_rows_at_risk{run="r"} 0.0' in restarted
    assert 'dlac_loss{run="r"}' not in restarted
    assert 'dlac_rows_per_s{run="r"}' not in restarted
