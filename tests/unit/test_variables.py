"""Variables, options of torchrun and properties: they become settings, or are refused or ignored by name."""

from typing import Any

import pytest

from dlac_pipeline.extensions.torchrun.options import launch_settings
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.named_catalogs import check_properties
from dlac_pipeline.lakehouse.variables import check_pyiceberg
from dlac_pipeline.spec.launch_spec import LaunchSpec


def test_ignored_variable_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A warning names a variable that PyIceberg ignores, once in a process."""
    for _ in range(2):
        check_pyiceberg({"PYICEBERG_MAX_WORKER": "x", "PYICEBERG_HOME": "x"})
    (message,) = caplog.messages
    assert "did you mean 'PYICEBERG_MAX_WORKERS'" in message


@pytest.mark.parametrize("name", ["s3.endpont", "S3.ENDPOINT", "s3_endpoint", "s3.access-key", "warehose"])
def test_misspelled_property_is_refused(name: str) -> None:
    """PyIceberg ignores it. Properties of another family, or unlike all of PyIceberg's, pass."""
    with pytest.raises(SpecInvalid, match="expected a property of PyIceberg such as '"):
        check_properties([name])
    check_properties(["s3.endpoint", "glue.access-key-id", "header.x", "s3.path-style-access", "custom"])


LAUNCH = LaunchSpec(script="train.py")


def settings(*options: str, launch: LaunchSpec = LAUNCH, **variables: str) -> dict[str, Any]:
    """Return the settings that options and variables replace, for the run `r`."""
    return launch_settings(options, variables, launch, "r")


@pytest.mark.parametrize(
    ("options", "replaced"),
    [
        (["--nproc-per-node", "2"], {"world_size": 2}),
        (["--nproc_per_node=2", "--standalone"], {"nodes": "", "rendezvous": "", "world_size": 2}),
        (
            ["--nnodes", "2:4", "--nproc-per-node", "8", "--rdzv-endpoint", "node-1:29500"],
            {"nodes": "2:4", "nproc_per_node": 8, "rendezvous": "node-1:29500"},
        ),
        (["--rdzv-endpoint", "[::1]"], {"rendezvous": "[::1]:29400"}),
        (["--master-addr", "node-1", "--master-port", "1234", "--node-rank", "1"], {"rendezvous": "node-1:1234"}),
        (["--rdzv-conf", "timeout=60,key_file=/k"], {"gather_timeout_s": "60", "rendezvous_key_file": "/k"}),
        (["--max-restarts", "0", "--start-method", "spawn"], {"max_restarts": 0, "start": "spawn"}),
        (["--rdzv-backend", "c10d", "--rdzv-id", "r", "--shutdown-timeout", "9"], {"deadline_s": 9}),
        ([], {}),
    ],
)
def test_options_become_settings(options: list[str], replaced: dict[str, Any]) -> None:
    """Only given options count. Defaults of torchrun replace nothing."""
    assert settings(*options) == replaced


def test_options_outweigh_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options have priority over variables, as in torchrun."""
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert settings(PET_NNODES="3", PET_NPROC_PER_NODE="4") == {"nodes": "3", "nproc_per_node": 4}
    assert settings("--nnodes", "2", PET_NNODES="3", PET_NPROC_PER_NODE="4")["nodes"] == "2"


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tee", "3"], "--tee"), (["--rdzv-id", "x"], "--rdzv-id = 'r'"), (["--nproc-per-node", "many"], "many")],
)
def test_meaningless_options_are_refused(options: list[str], message: str) -> None:
    """The error names the option."""
    with pytest.raises(SpecInvalid, match=message):
        settings(*options)
