"""Catalogs by their name in PyIceberg's configuration: places, precedence, refusals, and the guard in every class."""

from pathlib import Path

import pytest
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.catalog.sql import SqlCatalog

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.upkeep.pins import list_pins
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured, CommitConflict, NoSuchSnapshot
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.iceberg.pins import hold
from dlac_pipeline.lakehouse.iceberg.safe_commit import CommitGuard, GuardedSqlCatalog, guarded_catalog
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.named_catalogs import configured
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec, parse_spec
from tests.conftest import source_rows
from tests.own_catalog import OwnCatalog


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a working folder and a PYICEBERG_HOME without any configuration."""
    for name in ("home", "cwd", "pyiceberg"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path / "pyiceberg"))
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def write_catalog(folder: Path, **settings: str) -> None:
    """Configure a catalog named prod in a folder's .pyiceberg.yaml."""
    lines = "".join(f'    {name}: "{value}"\n' for name, value in settings.items())
    (folder / ".pyiceberg.yaml").write_text(f"catalog:\n  prod:\n{lines}")


@pytest.mark.parametrize("place", ["home", "cwd", "pyiceberg"])
def test_name_is_found_in_file(places: Path, place: str) -> None:
    """Home, working folder and PYICEBERG_HOME are searched."""
    write_catalog(places / place, uri="http://host:1", token="s3cr3t", warehouse="w")
    found = configured(LakehouseConfig(name="prod"))
    assert (found.kind, found.uri, found.warehouse) == ("rest", "http://host:1", "w")
    assert found.properties == {"token": "s3cr3t"}


def test_environment_overrides_file(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment wins over the file, and the job spec over both."""
    write_catalog(places / "home", uri="http://file:1", warehouse="file")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__WAREHOUSE", "environment")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__S3__ENDPOINT", "http://s3")
    found = configured(LakehouseConfig(name="prod", properties={"s3.region": "here"}))
    assert (found.uri, found.warehouse) == ("http://file:1", "environment")
    assert found.properties == {"s3.endpoint": "http://s3", "s3.region": "here"}
    assert configured(LakehouseConfig(name="prod", warehouse="spec")).warehouse == "spec"


def test_unknown_name_is_refused(places: Path) -> None:
    """No SQLite lakehouse is made, and all places that were looked up are listed."""
    write_catalog(places / "home", uri="http://host:1")
    with pytest.raises(CatalogMisconfigured, match=r"found only \['prod'\].*PYICEBERG_CATALOG__LAKE__") as caught:
        connect(LakehouseConfig(name="lake").at_home(places / "embedded"))
    for place, state in (("home", "read"), ("cwd", "no such file"), ("pyiceberg", "no such file")):
        assert f"{places / place / '.pyiceberg.yaml'} ({state})" in str(caught.value)
    assert not (places / "embedded").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("catalog:\n  prod:\n    uri: sqlite:///:memory:\n", "correct"),
        ('catalog:\n  prod:\n    type: in-memory\n    uri: "sqlite:///:memory:"\n', "in-memory"),
    ],
)
def test_malformed_file_is_refused(places: Path, text: str, message: str) -> None:
    """A file that YAML, or PyIceberg, cannot read is an error of the configuration. So is a catalog for each process."""
    (places / "home" / ".pyiceberg.yaml").write_text(text)
    with pytest.raises(CatalogMisconfigured, match=message):
        connect(LakehouseConfig(name="prod"))


def test_named_catalog_is_opened(places: Path) -> None:
    """Ledger tables are made in the configured catalog; the spec, which is written, keeps the name alone."""
    write_catalog(places / "home", uri=f"sqlite:///{places}/prod.db", warehouse=f"file://{places}/wh", token="s3cr3t")
    config = LakehouseConfig(name="prod").at_home(places / "embedded")
    lakehouse = connect(config)
    assert lakehouse.named == config
    assert "s3cr3t" not in config.model_dump_json() + repr(lakehouse.config)
    assert SqlCatalog("prod", uri=f"sqlite:///{places}/prod.db").list_tables("dlac")
    spec = {"run": "r", "lakehouse": config.model_dump(), "order": {"batch_size": 8, "key_groups": 1}}
    spec |= {"source": {"table": "a.b", "columns": ["x"]}, "launch": {"script": "-"}}
    files = tiers_of(parse_spec(spec, origin="the test").resolved(places / "embedded")).files
    assert files._remote.properties["token"] == "s3cr3t"


def test_own_class_is_guarded(places: Path) -> None:
    """A py-catalog-impl commits under the guard as well."""
    own = {"py-catalog-impl": "tests.own_catalog.OwnCatalog", "uri": f"sqlite:///{places}/p.db"}
    write_catalog(places / "home", **own, warehouse=f"file://{places}/wh")
    catalog = connect(LakehouseConfig(name="prod")).catalog
    assert isinstance(catalog, GuardedSqlCatalog)
    assert isinstance(catalog, OwnCatalog)
    guarded = guarded_catalog("pyiceberg.catalog.noop.NoopCatalog")
    assert issubclass(guarded, CommitGuard)
    assert issubclass(guarded, NoopCatalog)
    with pytest.raises(ValueError, match="class of a catalog"):
        guarded_catalog("pyiceberg.catalog.noop.Nothing")


def test_source_is_in_another_catalog(places: Path) -> None:
    """Rows, pins and plans: the tag is in the source's catalog, and the plan in the lakehouse's."""
    write_catalog(places / "home", uri=f"sqlite:///{places}/prod.db", warehouse=f"file://{places}/wh")
    other = SqlCatalog("prod", uri=f"sqlite:///{places}/prod.db", warehouse=f"file://{places}/wh")
    other.create_namespace("src")
    rows = source_rows(0, 10)
    other.create_table("src.t", rows.schema).append(rows)
    lakehouse = connect(LakehouseConfig().at_home(places / "embedded"))
    source = SourceSpec(table="prod:src.t", columns=["row_id"])
    assert SourceSpec.model_validate(source.model_dump()) == source
    plan = make_plan(lakehouse, source)
    assert plan.row.source_table == "prod:src.t"
    assert plan.row.tag in other.load_table("src.t").refs()
    assert not lakehouse.catalog.namespace_exists("src")
    assert Plans(lakehouse).load(plan.row.plan_id).row == plan.row
    assert [pin.table for pin in list_pins(lakehouse)] == ["prod:src.t"]
    with pytest.raises(CatalogMisconfigured, match="'gone'"):
        make_plan(lakehouse, SourceSpec(table="gone:src.t", columns=["row_id"]))
    other.load_table("src.t").append(rows)
    stale = lakehouse.load("prod:src.t")
    other.load_table("src.t").append(rows)
    with pytest.raises(CommitConflict):
        stale.append(rows)
    assert hold(lakehouse, "prod:src.t", stale.current_snapshot().snapshot_id, "tag")  # type: ignore[union-attr]


def test_ref_names_branch_or_tag(places: Path) -> None:
    """A tag and a branch are pinned where they are when the plan is made; a ref that is not there is refused."""
    lakehouse = connect(LakehouseConfig().at_home(places / "embedded"))
    lakehouse.create_namespace("src")
    rows = source_rows(0, 10)
    table = lakehouse.catalog.create_table("src.t", rows.schema)
    table.append(rows)
    first = snapshot_of(table, None).snapshot_id
    table.manage_snapshots().create_tag(first, "v1").commit()
    table.append(rows)
    table.manage_snapshots().create_branch(first, "trial").commit()
    for ref in ("v1", "trial"):
        plan = make_plan(lakehouse, SourceSpec(table="src.t", columns=["row_id"], version=ref))
        assert (plan.row.snapshot_id, plan.row.rows) == (first, 10)
    with pytest.raises(NoSuchSnapshot, match=r"'v2'.*'main', 'trial', 'v1'"):
        make_plan(lakehouse, SourceSpec(table="src.t", columns=["row_id"], version="v2"))
