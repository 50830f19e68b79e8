"""The same healing with Dagster's instance storage in a real PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import dagster as dg
import pytest

from dlac_pipeline.audit.audit import audit_run
from jobs.local_dagster import LocalDagster
from tests.conftest import Arena, wait_until
from tests.dagster_runs import events_of, runs_that_recover, trained_to

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Dagster's own libraries warn of each other
    pytest.mark.soak,
    pytest.mark.skipif(
        find_spec("dagster_postgres") is None, reason="needs dagster-postgres: pip install dlac[postgres]"
    ),
    pytest.mark.skipif(shutil.which("initdb") is None, reason="needs PostgreSQL's initdb and postgres on the PATH"),
]


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server on a socket in a folder of its own; gives an address in SQLAlchemy's form."""
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="dlac-postgres-"))
    try:
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "cwd": folder} if os.getuid() == 0 else {"cwd": folder}
        data = str(folder / "data")
        command = ["initdb", "-D", data, "-A", "trust", "-U", "dagster", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **who)
        settings = ["-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        with subprocess.Popen(["postgres", "-D", data, *settings], stderr=subprocess.DEVNULL, **who) as server:
            try:
                ready = ["psql", "-h", str(folder), "-U", "dagster", "-c", "SELECT 1", "postgres"]
                wait_until(
                    lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0,
                    what="the server",
                    within_s=30,
                )
                yield f"postgresql+psycopg2://dagster@/postgres?host={folder}"
            finally:
                server.terminate()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_run_heals_with_its_instance_in_postgresql(campaign: Arena) -> None:
    """Queue, tags, heartbeats, sensors and a lost run, all in PostgreSQL: nothing is lost and nothing is repeated."""
    with postgres() as address:
        dagster = LocalDagster(campaign.home, settings={"storage": {"postgres": {"postgres_url": address}}})
        spec = campaign.spec("postgres", pause_s=0.05)
        with dagster.running() as daemon:
            run_id, processes = trained_to(dagster, spec)
            worker = processes[0]
            for process in (worker.parent(), worker):
                assert process is not None
                process.kill()
            ended = dagster.wait(run_id, timeout_s=90)
            assert ended.status == dg.DagsterRunStatus.FAILURE
            [lost] = events_of(dagster, run_id, dg.DagsterEventType.RUN_FAILURE)
            assert "is gone" in lost.message
            recovery = dagster.wait(dagster.recovery_of(run_id))
            assert recovery.status == dg.DagsterRunStatus.SUCCESS
            assert len(runs_that_recover(dagster, run_id)) == 1
            assert daemon.is_running()
        with dagster.instance() as instance:
            assert type(instance.run_storage).__module__.startswith("dagster_postgres")
    assert audit_run(campaign.lakehouse, spec.run).exact
    assert campaign.losses(spec.run) == campaign.losses("reference")
