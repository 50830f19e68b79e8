"""Listeners of real training runs, with the real libraries: a rank is killed, and listeners misbehave."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from tests.conftest import Arena, Launch
from tests.extensions.listeners.listening import (
    Receiver,
    read_events,
    read_wandb_run,
    running_receiver,
    use_libraries,
    with_listeners,
)
from tests.launched_nodes import job, train_together

DAGSTER_RUN = "0f2c8a52-4f6e-4bd2-8ad5-1d2b8c7c4f3e"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which this process imports to read


@dataclass(frozen=True, kw_only=True)
class Listened:
    """A finished run with listeners, whose rank was killed once."""

    arena: Arena
    launch: Launch
    receiver: Receiver
    folder: Path
    """Files of MLflow, W&B and the recording listener."""

    @property
    def recorded(self) -> list[dict[str, Any]]:
        """Events that the recording listener received."""
        return read_events(self.folder / "events.jsonl")


@pytest.fixture(scope="module")
def listened(campaign: Arena, strangers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listened]:
    """Train with all listeners, and kill a rank after the first checkpoint."""
    folder = tmp_path_factory.mktemp("listened")
    chosen: dict[str, Any] = {"openlineage": {"namespace": "training"}, "mlflow": {"experiment": "tests"}}
    chosen |= {"wandb": {"project": "tests"}, "opentelemetry": {}, "records": {"path": str(folder / "events.jsonl")}}
    with pytest.MonkeyPatch.context() as monkeypatch, running_receiver() as receiver:
        use_libraries(monkeypatch, receiver, folder)
        spec = with_listeners(campaign.spec("listened", pause_s=0.04), **chosen)
        launch = campaign.launch(spec, launched_by=DAGSTER_RUN)
        launch.wait_for("checkpoint", 2)
        os.kill(launch.ranks()[-1].pid, signal.SIGKILL)
        assert launch.wait() == 0, launch.stderr
        yield Listened(arena=campaign, launch=launch, receiver=receiver, folder=folder)


def test_listeners_change_no_loss(arena: Arena, strangers: None, tmp_path: Path) -> None:
    """A listener raises, and another one hears of each checkpoint. The losses equal the run's without listeners."""
    arena.table(appends=(320,))
    alone, heard = (arena.spec(run, world_size=1, passes=1, every_steps=5) for run in ("alone", "heard"))
    arena.train(alone)
    arena.train(with_listeners(heard, raises={}, records={"path": str(tmp_path / "events.jsonl")}))
    assert arena.losses("heard") == arena.losses("alone")
    events = read_events(tmp_path / "events.jsonl")
    committed = [each["checkpoint_id"] for each in events if each["kind"] == "CheckpointCommitted"]
    assert committed == [each.checkpoint_id for each in arena.lineage("heard")]
    assert events[-1]["kind"] == "closed"


@pytest.mark.slow
def test_other_listeners_receive_all_events(listened: Listened) -> None:
    """An entry point receives typed events in order: of two attempts, their checkpoints, the failure and the recovery."""
    assert listened.arena.losses("listened") == listened.arena.losses("reference")
    events = listened.recorded
    kinds = [each["kind"] for each in events if each["kind"] != "ProgressMade"]
    assert [kind for kind in kinds if kind != "CheckpointCommitted"] == [
        *("AttemptStarted", "AttemptEnded", "AttemptStarted", "RecoveryEnded", "AttemptEnded", "closed"),
    ]
    first, second = (each for each in events if each["kind"] == "AttemptStarted")
    (table,) = first["tables"]
    source = snapshot_of(listened.arena.lakehouse.load("src.t"), None)
    assert (table["table"], table["snapshot_id"], table["rows"]) == ("src.t", source.snapshot_id, 2000)
    assert (first["attempt"], first["world_size"], first["parent_run"]) == (1, 2, DAGSTER_RUN)
    committed = [each for each in events if each["kind"] == "CheckpointCommitted"]
    lineage = listened.arena.lineage("listened")
    assert [each["checkpoint_id"] for each in committed] == [each.checkpoint_id for each in lineage]
    assert second["resumed_from"] in [each.checkpoint_id for each in lineage]
    assert sum(each["rows_by_table"]["src.t"] for each in committed) == 2 * 2000
    for each, row in zip(committed, lineage, strict=True):
        assert row.manifest_uri.startswith(each["location"])
    assert [each["ending"] for each in events if each["kind"] == "AttemptEnded"] == ["failed", "finished"]
    progress = [each for each in events if each["kind"] == "ProgressMade"]
    assert progress
    starts = {each["attempt"]: each["step"] for each in (first, second)}
    for each in progress:  # a rank may be ahead of the other
        assert 0 <= each["rows"] - 32 * (each["step"] - starts[each["attempt"]]) <= 64


@pytest.mark.slow
def test_openlineage_has_run_per_attempt(listened: Listened) -> None:
    """Each attempt is a run with one start and one end. Inputs have snapshots and row counts, outputs are checkpoints."""
    events = listened.receiver.read_json("/api/v1/lineage")
    changes = [each["eventType"] for each in events if each["eventType"] != "RUNNING"]
    assert changes == ["START", "FAIL", "START", "COMPLETE"]
    assert len({each["run"]["runId"] for each in events}) == 2
    snapshot = str(listened.recorded[0]["tables"][0]["snapshot_id"])
    for each in events:
        assert each["job"] | {"facets": {}} == {"namespace": "training", "name": "listened", "facets": {}}
        assert each["run"]["facets"]["parent"]["run"]["runId"] == DAGSTER_RUN
        (table,) = each["inputs"]
        assert table["facets"]["version"]["datasetVersion"] == snapshot
        assert table["name"].endswith("/src/t")
        assert table["facets"]["symlinks"]["identifiers"][0]["name"] == "src.t"
    assert events[-1]["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] < 2 * 2000
    heads = [each["outputs"][0]["facets"]["version"]["datasetVersion"] for each in events if each["outputs"]]
    lineage = [each.checkpoint_id for each in listened.arena.lineage("listened")]
    assert list(dict.fromkeys(heads)) == lineage


@pytest.mark.slow
def test_mlflow_run_spans_recovery(listened: Listened) -> None:
    """One MLflow run has each step once, with the ledger's loss, and the tags of the last checkpoint."""
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient((listened.folder / "mlruns").as_uri())
        experiment = client.get_experiment_by_name("tests")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        sampled = client.get_metric_history(run.info.run_id, "progress/loss")
    losses = listened.arena.losses("listened")
    assert [(each.step, each.value) for each in history] == list(enumerate(losses, 1))
    assert sampled
    assert [each.value for each in sampled] == [losses[each.step - 1] for each in sampled]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "listened")
    head = listened.arena.lineage("listened")[-1]
    assert run.data.tags["dlac.checkpoint_id"] == head.checkpoint_id
    assert (run.data.tags["dlac.attempt"], run.data.tags["dlac.checkpoint_step"]) == ("2", str(head.step))
    assert run.inputs is not None
    (table,) = run.inputs.dataset_inputs
    assert (table.dataset.name, table.dataset.profile) == ("src.t", '{"num_rows": 2000}')
    assert "progress/rows_at_risk" in run.data.metrics


@pytest.mark.slow
def test_wandb_files_have_losses(listened: Listened) -> None:
    """The offline run has each step once, with the ledger's loss, and the last checkpoint."""
    (path,) = (listened.folder / "wandb").glob("offline-run-*/run-*.wandb")
    run = read_wandb_run(path)
    assert run.losses == {step: [loss] for step, loss in enumerate(listened.arena.losses("listened"), 1)}
    assert run.summary["checkpoint_id"] == listened.arena.head("listened")


@pytest.mark.slow
def test_opentelemetry_has_recovery_spans(listened: Listened) -> None:
    """A recovery is a span with its phases below it. Gauges have step, loss and rows at risk."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies = listened.receiver.bodies
    traces = [ExportTraceServiceRequest.FromString(body) for body in bodies["/v1/traces"]]
    spans = [
        span for each in traces for resource in each.resource_spans for s in resource.scope_spans for span in s.spans
    ]
    (recovery,) = (span for span in spans if span.name == "dlac.recovery")
    phases = [span for span in spans if span is not recovery]
    assert {span.parent_span_id for span in phases} == {recovery.span_id}
    assert {f"dlac.recovery.{phase}" for phase in ("detect", "verify", "first_step")} <= {each.name for each in phases}
    assert recovery.start_time_unix_nano == min(span.start_time_unix_nano for span in phases)
    assert "SIGKILL" in {each.key: each.value.string_value for each in recovery.attributes}["dlac.cause"]
    metrics = [ExportMetricsServiceRequest.FromString(body) for body in bodies["/v1/metrics"]]
    scopes = [scope for each in metrics for resource in each.resource_metrics for scope in resource.scope_metrics]
    names = {metric.name for scope in scopes for metric in scope.metrics}
    assert names == {"dlac.step", "dlac.loss", "dlac.loss_step", "dlac.rows_at_risk", "dlac.rows_per_s"}


@pytest.mark.slow
def test_held_interpreter_does_not_stop_training(campaign: Arena, strangers: None) -> None:
    """A listener hangs in C, so that its process does nothing more. It is killed at the end of the run."""
    launch = campaign.launched(with_listeners(campaign.spec("held", passes=1, every_steps=20), holds_lock={}))
    assert launch.of("ended")[0]["ending"] == "finished"
    assert "the listeners of run 'held' did not end in time, and are killed" in launch.stderr
    assert campaign.losses("held")[:62] == campaign.losses("reference")[:62]


@pytest.mark.soak
def test_leading_node_alone_emits(campaign: Arena, strangers: None, tmp_path: Path) -> None:
    """Two nodes train, and the leader is killed. Each attempt and each checkpoint is reported once, by the node that leads."""
    events = tmp_path / "events.jsonl"
    spec = with_listeners(job(campaign, "on-two-nodes"), records={"path": str(events)})
    leader, other = train_together(campaign, spec)
    leader.destroy()
    assert other.wait() == 0, other.stderr
    found = read_events(events)
    started = [each["attempt"] for each in found if each["kind"] == "AttemptStarted"]
    assert started == [row.attempt for row in campaign.rows(spec.run, ClaimRow)]
    committed = [each["checkpoint_id"] for each in found if each["kind"] == "CheckpointCommitted"]
    assert len(committed) == len(set(committed))
    assert set(committed) <= {row.checkpoint_id for row in campaign.rows(spec.run, CheckpointRow)}
    assert [each["nodes"] for each in found if each["kind"] == "AttemptStarted"][-2:] == [2, 1]
    assert [each["ending"] for each in found if each["kind"] == "AttemptEnded"][-2:] == ["lost", "finished"]
