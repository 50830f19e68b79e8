"""The same recovery with Dagster's instance storage in a real PostgreSQL server."""

from importlib.util import find_spec

import dagster as dg
import pytest

from dlac_pipeline.audit.audit import audit_run
from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena
from tests.dagster_runs import events_of, runs_that_recover, train_to
from tests.postgres_server import needs_postgres, postgres

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Dagster's own libraries cause warnings
    pytest.mark.soak,
    pytest.mark.skipif(
        find_spec("dagster_postgres") is None, reason="needs dagster-postgres: pip install dlac-pipeline[postgres]"
    ),
    *needs_postgres,
]


def test_killed_run_heals_on_postgres_instance(campaign: Arena) -> None:
    """Queue, tags, heartbeats, sensors and a lost run are in PostgreSQL. No row is lost or repeated."""
    with postgres() as address:
        dagster = LocalDagster(campaign.home, settings={"storage": {"postgres": {"postgres_url": address}}})
        spec = campaign.spec("postgres", pause_s=0.05)
        dagster.write_job_file(spec)
        with dagster.running() as daemon:
            run_id, processes = train_to(dagster, spec)
            worker = processes[0]
            for process in (worker.parent(), worker):
                assert process is not None
                process.kill()
            assert dagster.wait(run_id, timeout_s=90).status == dg.DagsterRunStatus.FAILURE
            [lost] = events_of(dagster, run_id, dg.DagsterEventType.RUN_FAILURE)
            assert "is gone" in lost.message
            assert dagster.wait(dagster.recovery_of(run_id)).status == dg.DagsterRunStatus.SUCCESS
            assert len(runs_that_recover(dagster, run_id)) == 1
            assert daemon.is_running()
        with dagster.instance() as instance:
            assert type(instance.run_storage).__module__.startswith("dagster_postgres")
    assert audit_run(campaign.lakehouse, spec.run).exact
    assert campaign.losses(spec.run) == campaign.losses("reference")
