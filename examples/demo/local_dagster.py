"""Dagster instance in a folder, from outside: its daemon, its jobs and runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import requests
import yaml
from dagster._core.remote_origin import RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.workspace.load import location_origins_from_yaml_paths

from dlac_pipeline.dagster.components.training_run import FOLDER, build_runs_of
from dlac_pipeline.dagster.sensors.recovery import RECOVERS_TAG
from dlac_pipeline.dagster.training_runs import model_key, plan_key
from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.spec.job_spec import JobSpec

_CHECKOUT = Path(__file__).resolve().parents[2]
WORKSPACE = _CHECKOUT / "workspace.yaml"
SETTINGS = _CHECKOUT / "jobs" / "dagster.yaml"
"""Settings of a Dagster instance for DLAC, for people to copy."""
_POLL_S = 0.25
_ENDS_WITHIN_S = 2.0
"""Seconds for a daemon or a webserver to end in order. The threads of a daemon end at once, but its process stays."""


class LocalDagster:
    """Dagster with its storage in `home`/dagster and the lakehouse in `home`. Use it inside `running()`."""

    def __init__(
        self,
        home: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        workspace: Path = WORKSPACE,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are further sections of dagster.yaml, such as `storage`. `variables` are added to the environment."""
        self.home = home.resolve()
        self._workspace = str(workspace)
        self._folder = self.home / "dagster"
        self._folder.mkdir(parents=True, exist_ok=True)
        merged = {**yaml.safe_load(SETTINGS.read_text()), **(settings or {})}
        (self._folder / "dagster.yaml").write_text(yaml.safe_dump(merged))
        self.environment = {
            **os.environ,
            **(variables or {}),
            "DAGSTER_HOME": str(self._folder),
            "DLAC_HOME": str(self.home),
            "PYTHONUNBUFFERED": "1",
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[psutil.Process]:
        """A real dagster-daemon with its code server, ended with all it started."""
        with self.instance():
            pass  # creates the storage: two processes that create it at once break it
        with self._start_process("daemon", "dagster-daemon", "run", "-w", self._workspace) as daemon:
            yield daemon

    @contextlib.contextmanager
    def webserver(self, *, timeout_s: float = 120.0) -> Iterator[str]:
        """Yield the address of a real dagster-webserver, once it answers.

        Raises:
            TrainingFailed: it does not answer in time.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        address = f"http://127.0.0.1:{port}"
        with self._start_process(
            "webserver", "dagster-webserver", "-h", "127.0.0.1", "-p", port, "-w", self._workspace
        ):
            deadline = time.monotonic() + timeout_s
            while not _answers(f"{address}/server_info"):
                if time.monotonic() > deadline:
                    raise TrainingFailed(f"expected a webserver at {address}, found none: see {self._folder}")
                time.sleep(_POLL_S)
            yield address

    @contextlib.contextmanager
    def _start_process(self, name: str, tool: str, *arguments: str) -> Iterator[psutil.Process]:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [_tool(tool), *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield psutil.Process(process.pid)
        finally:
            _end_tree(process)

    def cancel(self, run_id: str) -> bool:
        """Request the end of a run, as the button in the UI does. Return True if the request was passed on."""
        with self.instance() as instance:
            return bool(instance.run_coordinator.cancel_run(run_id))

    def launch(self, job: str, run_config: dict[str, Any], *, tags: Mapping[str, str] | None = None) -> str:
        """Submit a run of a job to the daemon's queue. Return its run id."""
        name = f"launch-{secrets.token_hex(4)}"
        config = self._folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(run_config))
        command = [_tool("dagster"), "job", "launch", "-w", self._workspace, "-j", job, "-c", str(config)]
        command += ["--tags", json.dumps({**(tags or {}), "dlac/launch": name})]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        with self.instance() as instance:
            runs = instance.get_runs(dg.RunsFilter(tags={"dlac/launch": name}))
        if not runs:
            raise TrainingFailed(f"expected dagster to accept a run of {job!r}, found:\n{done.stdout}{done.stderr}")
        return str(runs[0].run_id)

    def write_job_file(self, spec: JobSpec) -> None:
        """Write the job file of a training run. The code location defines its assets, once it is loaded after that."""
        (self.home / FOLDER).mkdir(exist_ok=True)
        settings = spec.model_dump(mode="json", exclude_none=True)
        (self.home / FOLDER / f"{spec.run}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))

    def train(self, run: str, *, config: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None) -> str:
        """Submit a Dagster run that plans and trains a run with a job file, with a `LaunchConfig`. Return its id."""
        runs = build_runs_of(self.home / FOLDER)
        defs = dg.Definitions.merge(runs, dg.Definitions(executor=dg.in_process_executor))
        run_config = {"ops": {model_key(run).to_python_identifier(): {"config": {**(config or {})}}}}
        with self.instance() as instance:
            return self.materialize(instance, defs, [plan_key(run), model_key(run)], run_config, tags)

    def materialize(
        self,
        instance: dg.DagsterInstance,
        defs: dg.Definitions,
        assets: Sequence[dg.AssetKey],
        run_config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a run that materializes assets with their checks, as the button in the UI does. Return its id.

        It starts no process, unlike `launch`.
        """
        job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=set(assets))
        (location,) = location_origins_from_yaml_paths([self._workspace])
        repository = RemoteRepositoryOrigin(code_location_origin=location, repository_name="__repository__")
        run = instance.create_run_for_job(
            job,
            run_config=run_config,
            tags=tags,
            remote_job_origin=RemoteJobOrigin(repository_origin=repository, job_name=job.name),
            asset_selection=frozenset(assets),
        )
        no_workspace: Any = None  # the queue's coordinator does not read it
        instance.run_coordinator.submit_run(dg.SubmitRunContext(run, no_workspace))
        return str(run.run_id)

    def wait(
        self, run_id: str, *, while_waiting: Callable[[], None] = lambda: None, timeout_s: float = 900.0
    ) -> dg.DagsterRun:
        """Wait until a run has ended, however it ended.

        Raises:
            TrainingFailed: it did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        with self.instance() as instance:
            while time.monotonic() < deadline:
                run = instance.get_run_by_id(run_id)
                if run is not None and run.is_finished:
                    return run
                while_waiting()
                time.sleep(_POLL_S)
        raise TrainingFailed(f"expected Dagster run {run_id} to end within {timeout_s:.0f} s: see {self._folder}")

    def recovery_of(self, run_id: str, *, timeout_s: float = 120.0) -> str:
        """The recovery run that the sensor requested for a dead run, once it has.

        Raises:
            TrainingFailed: none was requested in time.
        """
        deadline = time.monotonic() + timeout_s
        with self.instance() as instance:
            while time.monotonic() < deadline:
                runs = instance.get_runs(dg.RunsFilter(tags={RECOVERS_TAG: run_id}))
                if runs:
                    return str(runs[0].run_id)
                time.sleep(_POLL_S)
        raise TrainingFailed(
            f"expected the sensor to request a recovery of run {run_id} within {timeout_s:.0f} s, found none"
        )

    def instance(self) -> dg.DagsterInstance:
        """Yield the instance, for reading runs and events."""
        return dg.DagsterInstance.from_config(str(self._folder))


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _answers(address: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(address, timeout=5).ok
    return False


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM a process and, after a while, SIGKILL it with everything it started."""
    if process.poll() is not None:
        return
    started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(started, timeout=_ENDS_WITHIN_S)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.wait()
