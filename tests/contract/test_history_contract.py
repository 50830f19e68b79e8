"""Promises of the door `dlac.histories`, by the history of Iceberg tables and by one of another distribution."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dlac_pipeline.extensions.history.changes import changes
from dlac_pipeline.lakehouse import doors
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, BadInput
from dlac_pipeline.plan.legs.changes import HISTORIES, Changes, history_of
from dlac_pipeline.spec.job_spec import parse_spec
from tests.contract.runs import Run
from tests.extensions.history.history_lake import Lake, read, rows_of
from tests.installed import install_distribution

_GROWING = '''
"""A history of tables whose data files stay as they are once they are written."""
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from dlac_pipeline.lakehouse.iceberg.data_files import live_files
from dlac_pipeline.lakehouse.iceberg.deletes import NO_ROWS
from dlac_pipeline.plan.legs.changes import Portion

class Grown:
    def __init__(self, table, since, until, *, on_overwrite, identity_columns):
        self.until = until
        self.old, self.new = ({file.path for file in live_files(table, each)} for each in (since, until))

    @property
    def portions(self):
        if not self.old <= self.new:
            raise AppendHistoryLost("expected a growing table, found files gone: start a new run")
        return [Portion(snapshot_id=self.until, files=frozenset(self.new - self.old))]

    def old_rows(self, snapshot_id, path):
        return NO_ROWS

    def gone(self, path):
        return NO_ROWS if path in self.new else None

    def check(self):
        self.portions
'''
SOURCES = {"iceberg": "src.t", "growing": "growing:/lake/t"}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a history of another distribution, for the sources of the format that it adds."""
    (site := tmp_path / "site").mkdir()
    points = {HISTORIES.group: ["growing = growing_history:Grown"]}
    monkeypatch.syspath_prepend(str(install_distribution(site, "growing", {"growing_history": _GROWING}, points)))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty table."""
    return Lake(tmp_path / "home").create("src.t")


def _changes(lake: Lake, name: str, since: int) -> Changes:
    return history_of(SOURCES[name])(lake.table, since, lake.now, on_overwrite="stop", identity_columns=[])


@pytest.mark.parametrize("name", SOURCES)
def test_appended_rows_are_read_once(name: str, lake: Lake) -> None:
    """Each row that came since is in one portion and not old. No planned row is gone."""
    since = lake.append(1, 2)
    planned = lake.paths()
    lake.append(3)
    lake.append(4, 5)
    found = _changes(lake, name, since)
    found.check()
    rows = [(each.snapshot_id, path) for each in found.portions for path in each.files]
    assert all(len(found.old_rows(snapshot_id, path)) == 0 for snapshot_id, path in rows)
    assert sorted(k for snapshot_id, path in rows for k in lake.live(snapshot_id, path)["k"].to_pylist()) == [3, 4, 5]
    assert [gone is not None and gone.tolist() for gone in map(found.gone, planned)] == [[]]


@pytest.mark.parametrize("name", SOURCES)
def test_unknown_rows_are_refused(name: str, lake: Lake) -> None:
    """A planned file that was overwritten ends the history before a row is read. Its rows are unknown, or exactly named."""
    since = lake.append(1, 2)
    [planned] = lake.paths()
    lake.rewrite([planned], [rows_of([1, 3])], "overwrite")
    found = _changes(lake, name, since)
    with pytest.raises(AppendHistoryLost):
        found.check()
    with pytest.raises(AppendHistoryLost):
        _ = found.portions
    gone = found.gone(planned)
    assert gone is None or set(read(planned)["k"].to_numpy()[gone].tolist()) == {2}


def test_format_without_history_is_followed_as_iceberg() -> None:
    """A source format has the history of its own name, or else that of its mirror."""
    assert history_of("growing:/lake/t") is not changes
    assert history_of("other:/lake/t") is changes
    assert history_of("src.t") is changes


def test_only_changed_source_needs_history(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed history a run resumes while its source stays. An append is refused with the missing part's name."""
    lake.append(*range(8))
    source = {"table": "src.t", "columns": ["k"], "follow": "appends"}
    order, launch = {"batch_size": 2, "key_groups": 2}, {"script": "x", "world_size": 1}
    spec = parse_spec({"run": "r", "source": source, "order": order, "launch": launch}, origin="the test")
    run = Run.begin(lake.lakehouse, spec)
    monkeypatch.setattr(
        doors, "entry_points", lambda **of: () if of["group"] == HISTORIES.group else entry_points(**of)
    )
    assert not run.turn(spec, repin=True)
    lake.append(8)
    with pytest.raises(BadInput, match=r"history of changed tables .* 'src.t', found 'iceberg': installed are none"):
        run.turn(spec, repin=True)
