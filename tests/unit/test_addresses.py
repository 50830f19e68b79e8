"""Addresses of folders, buckets and catalogs: each has one spelling, and a typo is refused by name."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from dlac_pipeline.lakehouse.config import LakehouseConfig, checked_address, sqlite_file
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured, CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.iceberg.relocation import Relocation
from dlac_pipeline.spec.job_spec import CheckpointSpec

_TYPOS = ("s3:/bucket", "s3:bucket", "s3//bucket/x", "S3:/b", "s4://bucket", "http://host/x", "s3://", "gs:///x")
_OTHERS = ("file://host/x", "file:x", " ", "a\0b", "a\nb", "~no-such-user-here/x")


@pytest.mark.parametrize("address", [*_TYPOS, *_OTHERS])
def test_malformed_address_is_refused(address: str) -> None:
    """The warehouse and the store refuse it. It would otherwise become a local folder of that name."""
    for make in (checked_address, lambda one: CheckpointSpec(store=one), lambda one: LakehouseConfig(warehouse=one)):
        with pytest.raises((ValueError, ValidationError), match=r"expected a (folder|value)"):
            make(address)


@pytest.mark.parametrize(
    ("address", "spelling"),
    [
        ("/a/b", "/a/b"),
        ("~/ck", str(Path.home() / "ck")),
        ("./s3:", str(Path.cwd() / "s3:")),
        ("file:///a b/c#d", "file:///a b/c#d"),
        ("file:/a", "file:///a"),
        ("s3://bucket/path/", "s3://bucket/path"),
    ],
)
def test_address_has_one_spelling(address: str, spelling: str) -> None:
    """The address is absolute, `~` is expanded, and reading it again changes nothing."""
    assert checked_address(address) == spelling
    assert checked_address(spelling) == spelling


def test_relative_warehouse_is_durable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The address is resolved once, and the file I/O that syncs writes its files."""
    monkeypatch.chdir(tmp_path)
    config = LakehouseConfig(uri="sqlite:///own.db", warehouse="tables")
    assert config.warehouse == f"file://{tmp_path}/tables"
    assert config.uri == f"sqlite:///{tmp_path}/own.db"
    lakehouse = connect(config)
    monkeypatch.chdir("/")
    assert type(lakehouse.own("plans").io).__name__ == "DurableFileIO"
    assert {path.name for path in tmp_path.iterdir()} == {"own.db", "tables"}


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%20b", "a b", "雪"])
def test_sqlite_file_is_found_again(name: str, tmp_path: Path) -> None:
    """An escape or a separator of an address may be part of a folder's name."""
    home = tmp_path / name
    assert sqlite_file(LakehouseConfig().at_home(home).uri) == home / "catalog.db"


@pytest.mark.parametrize(
    ("kind", "uri"),
    [
        ("sql", "mysq://host/lake"),
        ("sql", "sqlite://tmp/catalog.db"),
        ("sql", "sqlite:////tmp/catalog.db?mode=ro&uri=true"),
        ("rest", "localhost:8181"),
        ("rest", "http://127.0.0.1:99999"),
    ],
)
def test_wrong_catalog_address_is_no_outage(kind: str, uri: str) -> None:
    """Waiting does not help: nothing is retried, and the error names the setting."""
    with pytest.raises(CatalogMisconfigured, match=r"lakehouse\.uri"):
        connect(LakehouseConfig.model_validate({"type": kind, "uri": uri, "warehouse": "/tmp/none"}))
    assert not CatalogMisconfigured.transient
    assert not issubclass(CatalogMisconfigured, CatalogUnreachable)


def test_relocation_is_reversible() -> None:
    """Paths are translated as whole names, the deepest folder first. Addresses keep their escapes."""
    moved = Relocation(moves=(("/a/wh", "/x"), ("/a", "/b c")))
    assert [moved.here(path) for path in ("/a", "/a/wh/t", "/ab", "/a/z")] == ["/b c", "/x/t", "/ab", "/b c/z"]
    assert moved.uri_here("file:///a/z%23") == "file:///b%20c/z%23"
    assert moved.to_recorded_uri("file:///b%20c/z%23") == "file:///a/z%23"
    assert moved.uri_here("s3://a/z") == "s3://a/z"
    assert Relocation.of_properties(moved.properties()) == moved
