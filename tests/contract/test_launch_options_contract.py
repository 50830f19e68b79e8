"""The door of launch options: torchrun's, and another author's that take their place."""

from pathlib import Path

import pytest
import yaml

from dlac_pipeline.cli import training
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request
from tests.conftest import Arena
from tests.fixtures import Command
from tests.installed import install_distribution

_OF_MPI = """
def read(options, environment, launch, run):
    assert list(options) == ["--nnodes", "2"] or environment.get("PET_NNODES") == "2"
    return {"nodes": "2", "rendezvous": "here:1"}
"""


@pytest.fixture(params=["torchrun", "mpi"])
def launched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The job specs that `dlac train` launches, with options of torchrun or of another author."""
    specs: list[JobSpec] = []
    if request.param == "mpi":
        points = {"test.launch_options": ["torchrun = of_mpi:read"]}
        monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "mpi", {"of_mpi": _OF_MPI}, points)))
        monkeypatch.setattr(training, "LAUNCH_OPTIONS", Door("test.launch_options", "kind of options"))
    monkeypatch.setattr(training, "_launch", lambda launch: specs.append(launch.spec))
    return specs


def written(arena: Arena) -> str:
    """Write a job spec, and return its file."""
    file = arena.home / "job.yaml"
    file.write_text(yaml.safe_dump(arena.spec("r", rendezvous="here:1").model_dump(mode="json")))
    return str(file)


@pytest.mark.parametrize("as_variable", [False, True])
def test_options_become_settings(launched: list[JobSpec], arena: Arena, here: Command, as_variable: bool) -> None:
    """Options that are not DLAC's, or variables, replace settings of the launch section."""
    if as_variable:
        arena.monkeypatch.setenv("PET_NNODES", "2")
    options = () if as_variable else ("--nnodes", "2")
    assert here("train", written(arena), *options).returncode == 0
    assert [(spec.launch.nodes, spec.launch.rendezvous) for spec in launched] == [("2", "here:1")]


def test_nothing_given_loads_nothing(arena: Arena, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options and variables of others the door stays closed."""
    launches: list[Request] = []
    monkeypatch.setattr(training, "LAUNCH_OPTIONS", None)
    monkeypatch.setattr(training, "_launch", launches.append)
    assert here("train", written(arena)).returncode == 0
    assert [launch.spec.launch.nodes for launch in launches] == [""]
