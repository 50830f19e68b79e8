"""The contract of names that extensions add to `dlac_pipeline`: DLAC's extensions, and a third party's."""

from pathlib import Path

import pytest

import dlac_pipeline
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput
from tests.installed import install_distribution

_METER = '''
def energy_of(run: str) -> str:
    """Return the energy that a run took."""
    return f"{run}: 7 Wh"
'''
_POINTS = [
    "energy_of = meter_names:energy_of",
    "training_run = meter_names:energy_of",
    "read = meter_names:energy_of",
    "Panel = meter_panel:Panel [sun]",
]
_OURS = [*Door("dlac.names", "name").points()]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a function, a name and a folder of the core's, and a class whose package is missing."""
    modules = {"meter_names": _METER, "meter_panel": "import panels_that_are_missing"}
    monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "meter", modules, {"dlac.names": _POINTS})))


@pytest.mark.parametrize("name", [*_OURS, "energy_of"])
def test_name_of_extension_is_found(name: str) -> None:
    """`dlac_pipeline` has the class or function of an entry under the name of the entry."""
    assert getattr(dlac_pipeline, name).__name__ == name


def test_name_of_core_is_kept() -> None:
    """An entry replaces neither a name nor a folder of the core."""
    assert dlac_pipeline.training_run.__module__ == "dlac_pipeline.train.training_run"
    with pytest.raises(AttributeError, match="has no attribute 'spec_of'"):
        _ = dlac_pipeline.spec_of
    assert getattr(dlac_pipeline, "read", None) is not dlac_pipeline.energy_of


def test_missing_package_is_named() -> None:
    """A name whose package is missing is refused with the command that installs it, when it is asked for."""
    with pytest.raises(BadInput, match=r'No module named \'panels_that_are_missing\': pip install "meter\[sun\]"'):
        _ = dlac_pipeline.Panel
