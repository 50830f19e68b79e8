"""The runs that alert sensors report, and alerts that cannot be delivered."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent

from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG
from dlac_pipeline.dagster.sensors import alerts
from dlac_pipeline.dagster.sensors.alerts import Alert, AlertUnsent, dlac_alerts, send_by_settings
from dlac_pipeline.dagster.settings import FILE
from dlac_pipeline.dagster.training_runs import model_key
from jobs.definitions import defs
from tests.conftest import Arena
from tests.dagster_runs import dagster_run

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other


class Pager:
    """Takes alerts; or refuses so many of them first."""

    def __init__(self) -> None:
        self.refuses, self.asked = 0, 0
        self.taken: list[Alert] = []

    def __call__(self, alert: Alert, log: logging.Logger) -> None:
        """As a function given to `dlac_alerts`."""
        self.asked += 1
        if self.asked <= self.refuses:
            raise ConnectionError("nobody answers")
        self.taken.append(alert)

    @property
    def sent(self) -> list[tuple[str, str]]:
        """Kind and training run of what was taken."""
        return [(alert.kind, alert.run) for alert in self.taken]


@dataclass
class Watch:
    """A sensor that is evaluated as the daemon does it: a tick that fails leaves the cursor."""

    sensor: dg.SensorDefinition
    instance: dg.DagsterInstance
    cursor: str | None = None

    def __post_init__(self) -> None:
        self.tick()

    def tick(self) -> str | None:
        """One evaluation; the reason that it gave."""
        repository = defs.get_repository_def()
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor, repository_def=repository)
        data = self.sensor.evaluate_tick(context)
        self.cursor = data.cursor
        return data.skip_message


def watched(instance: dg.DagsterInstance, name: str, send: alerts.Send) -> Watch:
    """One of the sensors, by the end of its name."""
    return Watch(next(each for each in dlac_alerts(send) if each.name == f"dlac_{name}"), instance)


def evaluated(instance: dg.DagsterInstance, run: dg.DagsterRun, check: str, **answer: Any) -> None:
    """A check of the model answers in a run."""
    evaluation = dg.AssetCheckEvaluation(asset_key=model_key("checked"), check_name=check, metadata={}, **answer)
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION.value
    instance.report_dagster_event(DagsterEvent(kind, run.job_name, event_specific_data=evaluation), run.run_id)


def ended_well(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """The run succeeds."""
    instance.report_dagster_event(DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name), run.run_id)


def test_alerts_separate_recovery_from_human_work(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """A run that died is a warning, one that would die again an error. The command gets both as JSON, and again if it fails."""
    arena.table()
    spec = arena.spec("alerting", world_size=1)
    (home / FILE).write_text(f'[alerts]\ncommand = ["sh", "-c", "cat >> {home}/alerts; echo >> {home}/alerts"]\n')
    failures = dlac_alerts()[0]
    for run in (dagster_run(instance, spec), dagster_run(instance, spec, tags={NO_RECOVERY_TAG: "Fenced"})):
        event = instance.report_run_failed(run, message="it died")
        failures(dg.build_run_status_sensor_context(failures.name, event, instance, run))
    alerts = [Alert(**json.loads(line)) for line in (home / "alerts").read_text().splitlines()]
    assert [(alert.kind, alert.severity, alert.run) for alert in alerts] == [
        ("recovering", "warning", "alerting"),
        ("gave_up", "error", "alerting"),
    ]
    assert [alert.message for alert in alerts] == ["it died"] * 2
    refusing = 'cat > /dev/null; echo tried >> "$0"; exit 1'
    (home / FILE).write_text(f"[alerts]\ncommand = ['sh', '-c', '{refusing}', '{home}/tries']\n")
    watch = watched(instance, "failure_alerts", send_by_settings)
    instance.report_run_failed(dagster_run(instance, spec, tags={NO_RECOVERY_TAG: "Fenced"}))
    for tries in (1, 2):
        with pytest.raises(AlertUnsent, match="to take an alert"):
            watch.tick()
        assert (home / "tries").read_text().count("tried") == tries


@pytest.mark.slow
def test_failed_checks_of_our_runs_are_reported(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """One alert for a run, with its worst severity, whether it ended well or failed."""
    pager = Pager()
    well, badly = (watched(instance, name, pager) for name in ("check_alerts", "failed_run_check_alerts"))
    spec, warn = arena.spec("checked", world_size=1), dg.AssetCheckSeverity.WARN
    trained, died = dagster_run(instance, spec), dagster_run(instance, spec)
    rehearsed = instance.create_run_for_job(defs.resolve_job_def("rehearse_job"), status=dg.DagsterRunStatus.STARTED)
    evaluated(instance, trained, "no_missing_rows", passed=True)
    evaluated(instance, trained, "checkpoint_restorable", passed=False, severity=warn, description="away")
    evaluated(instance, trained, "consumption_exact", passed=False, description="3 contradictions")
    evaluated(instance, died, "no_missing_rows", passed=False, description="tried again")
    evaluated(instance, died, "no_missing_rows", passed=True)
    evaluated(instance, died, "checkpoint_restorable", passed=False, severity=warn)
    evaluated(instance, rehearsed, "rehearsal_identical", passed=False, description="differs")
    ended_well(instance, trained)
    ended_well(instance, rehearsed)
    instance.report_run_failed(died)
    for _ in range(3):
        well.tick()
        badly.tick()
    both = "checkpoint_restorable of models/checked: away; consumption_exact of models/checked: 3 contradictions"
    assert [(alert.dagster_run, alert.severity, alert.message) for alert in pager.taken] == [
        (trained.run_id, "error", both),
        (died.run_id, "warning", "checkpoint_restorable of models/checked: it does not hold"),
        (rehearsed.run_id, "error", "rehearsal_identical of models/checked: differs"),
    ]
    assert {alert.kind for alert in pager.taken} == {"check_failed"}


@pytest.mark.slow
def test_refused_alert_is_retried_in_order(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """The tick fails, and the next one sends it before later ones. After an hour it is given up."""
    pager = Pager()
    watch = watched(instance, "failure_alerts", pager)

    def fails(name: str) -> None:
        hopeless = dagster_run(instance, arena.spec(name, world_size=1), tags={NO_RECOVERY_TAG: "NoProgress"})
        instance.report_run_failed(hopeless, message="it died")

    fails("refused")
    fails("after-it")
    pager.refuses = 1
    with pytest.raises(AlertUnsent, match="nobody answers"):
        watch.tick()
    watch.tick()
    watch.tick()
    assert pager.sent == [("gave_up", "refused"), ("gave_up", "after-it")]
    fails("unwanted")
    pager.asked = 0
    arena.monkeypatch.setattr(alerts, "HELD_S", 0.0)
    assert "gave up the alert" in str(watch.tick())
    fails("last")
    watch.tick()
    assert pager.sent[2:] == [("gave_up", "last")]
