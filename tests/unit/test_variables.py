"""Variables and properties that a library ignores, or whose values it cannot read."""

from __future__ import annotations

import os

import pytest

from dlac_pipeline.elastic.torchrun_options import launch_settings
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.named_catalogs import check_properties
from dlac_pipeline.lakehouse.variables import check_pyiceberg
from dlac_pipeline.spec.launch_spec import LaunchSpec


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("PYICEBERG_CATALGO__P__URI", "unset it"),
        ("PYICEBERG_MAX_WORKER", "did you mean 'PYICEBERG_MAX_WORKERS'"),
        ("PYICEBERG_CATALOG_P__URI", "unset it"),
    ],
)
def test_ignored_variable_is_named(name: str, advice: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names a variable that PyIceberg ignores, once in a process."""
    for _ in range(2):
        check_pyiceberg({name: "x", "PYICEBERG_CATALOG__P__URI": "x", "PYICEBERG_HOME": "x"})
    (message,) = caplog.messages
    assert repr(name) in message
    assert advice in message


def test_ignored_option_variable_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names a PET_ variable that torchrun ignores. Others count."""
    monkeypatch.setenv("PET_NPROC_PER_NOD", "8")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    found = launch_settings([], os.environ, LaunchSpec(script="x.py"), "r")
    assert found == {"max_restarts": 2}
    assert "did you mean 'PET_NPROC_PER_NODE'" in caplog.text


@pytest.mark.parametrize("value", ["many", "-1", "1.5", ""])
@pytest.mark.parametrize("name", ["MAX_WORKERS", "MANIFEST_CACHE_SIZE", "LEGACY_CURRENT_SNAPSHOT_ID"])
def test_unreadable_value_is_refused(name: str, value: str) -> None:
    """PyIceberg raises for such values at its import, or in the middle of a command."""
    with pytest.raises(SpecInvalid, match=f"PYICEBERG_{name}, found '{value}'"):
        check_pyiceberg({f"PYICEBERG_{name}": value})


@pytest.mark.parametrize("name", ["s3.endpont", "S3.ENDPOINT", "s3_endpoint", "s3.access-key", "warehose"])
def test_misspelled_property_is_refused(name: str) -> None:
    """PyIceberg ignores it. Properties of another family, or unlike all of PyIceberg's, pass."""
    with pytest.raises(SpecInvalid, match="expected a property of PyIceberg such as '"):
        check_properties([name])
    check_properties(["s3.endpoint", "glue.access-key-id", "header.x", "s3.path-style-access", "custom"])
