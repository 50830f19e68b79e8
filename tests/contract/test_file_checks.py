"""Promises of the door `dlac.file_checks`, by the check of registered files and by one of another distribution."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table

from dlac_pipeline.extensions.registration.register import register
from dlac_pipeline.lakehouse.errors import BadInput, DataFileChanged
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.sources import FILE_CHECKS, check_data_files
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.conftest import Arena
from tests.installed import install_distribution

_METER = """
from pathlib import Path
from dlac_pipeline.lakehouse.errors import DataFileChanged

def check(table):
    [path] = [task.file.file_path for task in table.scan().plan_files()]
    if Path(path).stat().st_size != int(table.properties["dlac.meter-bytes"]):
        raise DataFileChanged(f"expected {path!r} in its size: restore it")
"""
_POINTS = ["dlac.meter-bytes = meter_check:check", "dlac.broken-check = meter_broken:check"]


def _registered(lakehouse: Lakehouse, file: Path) -> None:
    register(lakehouse, "src.t", str(file.parent))


def _metered(lakehouse: Lakehouse, file: Path) -> None:
    table = _added(lakehouse, file)
    table.transaction().set_properties({"dlac.meter-bytes": str(file.stat().st_size)}).commit_transaction()


def _added(lakehouse: Lakehouse, file: Path) -> Table:
    lakehouse.create_namespace("src")
    table = lakehouse.catalog.create_table("src.t", pq.read_schema(file))
    table.add_files([str(file)])
    return table


MAKERS: dict[str, Callable[[Lakehouse, Path], None]] = {
    "dlac.registered-location": _registered,
    "dlac.meter-bytes": _metered,
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a check of another distribution, and one whose module is missing."""
    (tmp_path / "meter").mkdir()
    points = {FILE_CHECKS.group: _POINTS}
    monkeypatch.syspath_prepend(str(install_distribution(tmp_path / "meter", "meter", {"meter_check": _METER}, points)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Parquet file in a new folder."""
    (tmp_path / "files").mkdir()
    pq.write_table(pa.table({"row_id": [1, 2, 3]}), tmp_path / "files" / "a.parquet")
    return tmp_path / "files" / "a.parquet"


@pytest.mark.parametrize("name", MAKERS)
def test_changed_file_is_not_planned(name: str, arena: Arena, file: Path) -> None:
    """A table with the property of a check is planned while its file is unchanged, and refused afterwards."""
    MAKERS[name](arena.lakehouse, file)
    source = SourceSpec(table="src.t", columns=["row_id"])
    assert make_plan(arena.lakehouse, source).row.rows == 3
    pq.write_table(pa.table({"row_id": [*range(100)]}), file)
    with pytest.raises(DataFileChanged, match=r"a\.parquet"):
        make_plan(arena.lakehouse, source)


def test_table_without_property_is_not_checked(arena: Arena, file: Path) -> None:
    """A property of another name demands nothing. A check that cannot be imported is an error only if it is demanded."""
    table = _added(arena.lakehouse, file)
    check_data_files(table)
    table.transaction().set_properties({"dlac.broken-check": "x", "dlac.unknown": "x"}).commit_transaction()
    with pytest.raises(BadInput, match=r"No module named 'meter_broken'"):
        check_data_files(arena.lakehouse.load("src.t"))
