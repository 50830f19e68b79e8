"""Names of tables of other formats, and formats whose packages are missing."""

import sys

import pytest

from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.lakehouse.source_names import SOURCES, external_identifier, mirror_name, split_identifier
from dlac_pipeline.spec.job_spec import SourceSpec


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


def test_mirror_name_has_two_parts() -> None:
    """Signs of a format's name that a catalog may refuse, or take for a namespace, are replaced."""
    assert mirror_name("a.b-c:/data", "dlac").startswith("dlac_external.a_b_c_")


@pytest.mark.parametrize("name", ["delta", "hudi"])
def test_missing_package_is_named_late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A spec is read without the package of its format. Loading the format names the command that installs it."""
    monkeypatch.setitem(sys.modules, {"delta": "deltalake", "hudi": "hudi"}[name], None)
    monkeypatch.delitem(sys.modules, f"dlac_pipeline.extensions.formats.{name}", raising=False)
    assert SourceSpec(format=name, table="/data/events", columns=["x"]).table == f"{name}:/data/events"
    with pytest.raises(BadInput, match=rf'source.format = \'{name}\' to load.*: pip install "dlac-pipeline\[{name}\]"'):
        SOURCES.load(name, setting="source.format")
