"""The door of row keys: the planner names its data files to the writer of this distribution, and to another author's."""

from pathlib import Path

import pytest

from dlac_pipeline.lakehouse import doors
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY
from dlac_pipeline.plan import planner
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.extensions.history.history_lake import Lake
from tests.installed import install_distribution

_MARKS = """
from pathlib import Path

class Marks:
    def __init__(self, lakehouse, table, schema, source):
        pass

    def write(self, snapshot_id, paths, *, older):
        for path in paths:
            Path(path.removeprefix("file://") + ".keyed").touch()
"""
SOURCE = SourceSpec(table="src.t", columns=["k"], row_keys=True, identity_columns=["k"])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A table of two data files."""
    lake = Lake(tmp_path / "home").create("src.t")
    lake.append(*range(4))
    lake.append(*range(4, 6))
    return lake


def test_planned_files_are_keyed(lake: Lake) -> None:
    """A plan of a source with `row_keys` records the keys of its data files."""
    planned = planner.make_plan(lake.lakehouse, SOURCE).units.file_paths
    assert sorted(lake.lakehouse.read_own("row_keys", NO_KEY)["file_path"].to_pylist()) == planned


def test_other_writer_gets_files(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of another distribution is given the same files."""
    (site := tmp_path / "site").mkdir()
    points = {"test.row_keys": ["keys = marks_of_keys:Marks"]}
    monkeypatch.syspath_prepend(str(install_distribution(site, "marks", {"marks_of_keys": _MARKS}, points)))
    monkeypatch.setattr(planner, "ROW_KEYS", Door("test.row_keys", "writer of row keys"))
    planned = planner.make_plan(lake.lakehouse, SOURCE).units.file_paths
    assert len(planned) == 2
    assert all(Path(f"{path.removeprefix('file://')}.keyed").exists() for path in planned)


def test_only_keyed_source_needs_writer(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed writer a source is planned without keys. A source with keys is refused before it is pinned."""
    monkeypatch.setattr(doors, "entry_points", lambda **selected: ())
    with pytest.raises(BadInput, match=r"in source\.row_keys, found 'keys': installed are none"):
        planner.make_plan(lake.lakehouse, SOURCE)
    assert [*lake.lakehouse.load("src.t").refs()] == ["main"]
    assert planner.make_plan(lake.lakehouse, SOURCE.model_copy(update={"row_keys": False})).row.live_rows == 6
