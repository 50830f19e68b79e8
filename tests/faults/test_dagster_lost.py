"""Dagster runs with a lost or silent process, and a restarted daemon. The tests start and kill their own daemons."""

from __future__ import annotations

from contextlib import suppress

import dagster as dg
import psutil
import pytest

from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena, wait_until
from tests.dagster_runs import check_healed, events_of, have_ended, train_to

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings


@pytest.mark.soak
def test_stopped_worker_never_commits_again(campaign: Arena) -> None:
    """SIGSTOP of the run's process: its missing heartbeat leads to a takeover. Its trainer exits without a reader of events."""
    home = campaign.home
    (home / "orchestration.toml").write_text("[recovery]\nlost_after_s = 20\nwait_for_old_launch_s = 2\n")
    dagster = LocalDagster(home)
    spec = campaign.spec("stopped-worker", pause_s=0.3, deadline_s=5.0)
    dagster.write_job_file(spec)
    try:
        with dagster.running():
            run_id, processes = train_to(dagster, spec)
            supervisor = LiveRun(spec.checkpoint.store, spec.run).supervisor()
            assert supervisor is not None
            trainer = [supervisor, *supervisor.children(recursive=True)]  # the worker also has Dagster's own processes
            processes[0].suspend()
            ended = dagster.wait(run_id, timeout_s=120)
            assert ended.status == dg.DagsterRunStatus.FAILURE
            recovery = dagster.recovery_of(run_id)
            wait_until(lambda: have_ended(trainer), what="the end of the old trainer", within_s=60)
            processes[0].resume()
            assert dagster.wait(recovery).status == dg.DagsterRunStatus.SUCCESS
            wait_until(lambda: have_ended(processes), what="the end of the old worker", within_s=60)
            check_healed(campaign, dagster, spec, run_id)
    finally:
        (home / "orchestration.toml").unlink()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.soak
def test_dead_node_is_found_by_daemon(campaign: Arena) -> None:
    """SIGKILL of daemon, code server, worker, supervisor and ranks at once. The run stays STARTED until it counts as lost."""
    dagster = LocalDagster(campaign.home)
    spec = campaign.spec("machine", pause_s=0.05)
    dagster.write_job_file(spec)
    with dagster.running() as daemon:
        run_id, processes = train_to(dagster, spec)
        everything = [daemon, *daemon.children(recursive=True), *processes]
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: have_ended(processes), what="the end of all processes", within_s=30)
    with dagster.instance() as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        assert run.status == dg.DagsterRunStatus.STARTED
    with dagster.running():
        ended = dagster.wait(run_id, timeout_s=90)
        assert ended.status == dg.DagsterRunStatus.FAILURE
        [lost] = events_of(dagster, run_id, dg.DagsterEventType.RUN_FAILURE)
        assert "is gone" in lost.message
        check_healed(campaign, dagster, spec, run_id)
