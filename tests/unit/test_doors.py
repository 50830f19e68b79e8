"""Doors: entry points of this distribution and of others, names that nothing answers to, and names of tables of other formats."""

import sys
from pathlib import Path

import pytest

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.lakehouse.source_names import SOURCES, external_identifier, split_identifier
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.installed import install_distribution

_DOOR = Door("dlac.test_animals", "animal")


@pytest.fixture
def animals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with four animals: a good one, and ones whose package is missing, whose name is wrong, and that raises."""
    points = ["cat = zoo_cats:Cat", "owl = zoo_owls:Owl [birds]", "dog = zoo_cats:Dog", "emu = zoo_emus:Emu"]
    modules = {
        "zoo_cats": "class Cat: ...",
        "zoo_owls": "import feathers_that_nobody_has",
        "zoo_emus": "raise RuntimeError('too hot')",
    }
    monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "zoo", modules, {"dlac.test_animals": points})))
    return tmp_path


@pytest.mark.usefixtures("animals")
def test_entry_of_distribution_loads() -> None:
    """An entry of any distribution is found by its name, and is imported by `load` only."""
    assert [*_DOOR.points()] == ["cat", "dog", "emu", "owl"]
    assert _DOOR.load("cat", setting="pet").__name__ == "Cat"


@pytest.mark.usefixtures("animals")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cta", "an installed animal in pet, found 'cta': did you mean 'cat'? Installed are cat, dog, emu, fish, owl"),
        ("owl", "pet = 'owl' to load, found No module named 'feathers_that_nobody_has': pip install \"zoo[birds]\""),
        ("emu", "pet = 'emu' to load, found RuntimeError: too hot: pip install \"zoo\""),
        ("dog", "pet = 'dog' to load, found module 'zoo_cats' has no attribute 'Dog': pip install \"zoo\""),
    ],
)
def test_missing_entry_is_named(name: str, message: str) -> None:
    """An unknown name lists what is installed. A missing package is named with the command that installs it."""
    with pytest.raises(BadInput) as refused:
        _DOOR.load(name, setting="pet", others=("fish",))
    assert str(refused.value) == f"expected {message}"


def test_two_entries_are_refused(animals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that two distributions have is no choice that the order of a path may make."""
    second = animals / "second"
    second.mkdir()
    points = {"dlac.test_animals": ["cat = other_cats:Cat"]}
    monkeypatch.syspath_prepend(
        str(install_distribution(second, "other-zoo", {"other_cats": "class Cat: ..."}, points))
    )
    with pytest.raises(BadInput, match="expected one animal 'cat', found"):
        _DOOR.find("cat", setting="pet")


@pytest.mark.parametrize(
    ("identifier", "place"),
    [
        ("delta:/data/events", ("delta", "/data/events")),
        ("of-another-author:/data", ("of-another-author", "/data")),
        ("docs.pages", None),
        ("lake:docs.pages", None),
        ("delta:docs.pages", None),
    ],
)
def test_location_marks_other_formats(identifier: str, place: tuple[str, str] | None) -> None:
    """A format needs no entry point to be recognized, so a ledger is read where the format is not installed."""
    assert split_identifier(identifier) == place
    if place is not None:
        assert external_identifier(place[0], identifier) == identifier == external_identifier(*place)


@pytest.mark.parametrize("name", ["delta", "hudi"])
def test_missing_package_is_named_late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A spec is read without the package of its format. Loading the format names the command that installs it."""
    monkeypatch.setitem(sys.modules, {"delta": "deltalake", "hudi": "hudi"}[name], None)
    monkeypatch.delitem(sys.modules, f"dlac_pipeline.extensions.formats.{name}", raising=False)
    assert SourceSpec(format=name, table="/data/events", columns=["x"]).table == f"{name}:/data/events"
    with pytest.raises(BadInput, match=rf'source.format = \'{name}\' to load.*: pip install "dlac-pipeline\[{name}\]"'):
        SOURCES.load(name, setting="source.format")
