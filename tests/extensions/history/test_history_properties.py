import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlac_pipeline.extensions.history.changes import History
from dlac_pipeline.extensions.history.steps import TableRows
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from tests.extensions.history.history_lake import Keyed, Lake, read, rows_of

Change = tuple[str, int, int]
WHAT = ["append", "append", "delete_rows", "drop", "compact", "delete", "overwrite", "update", "pin"]
CHANGES = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 99), st.integers(1, 3)), min_size=1, max_size=9)


class Story:
    """A random history of a table, and a plain model of it."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.next = 0
        self.live: dict[int, set[int]] = {}
        """Snapshot -> keys, by the model."""
        self.keys: set[int] = set()
        self.brought: set[int] = set()
        self.tell("append", 0, 3)
        self.tell("append", 0, 2)
        self.since = lake.now
        lake.table.manage_snapshots().create_tag(self.since, "pin").commit()
        self.brought.clear()

    def tell(self, what: str, where: int, count: int) -> None:
        """Apply the same change to the table and to the model."""
        known = sorted(self.keys)
        chosen = {known[(where * 7 + place) % len(known)] for place in range(count)} if known else set()
        paths = sorted(self.lake.paths(), key=lambda path: read(path).to_pydict()["k"]) if self.live else []
        some = list(dict.fromkeys(paths[(where + place) % len(paths)] for place in range(count))) if paths else []
        fresh = list(range(self.next, self.next + count))
        if what == "append":
            self.lake.append(*fresh)
            self._came(fresh)
        elif what in ("delete_rows", "delete") and chosen:
            getattr(self.lake, what)(*chosen)
            self.keys -= chosen
        elif what == "drop" and some:
            self.keys -= {k for path in some for k in self.lake.live(self.lake.now, path)["k"].to_pylist()}
            self.lake.rewrite(some, [], "delete")
        elif what == "compact" and some:
            self.lake.compact(*some, operation="replace")
        elif what == "overwrite" and some:
            kept = pa.concat_tables([self.lake.live(self.lake.now, path) for path in some])
            self.keys -= set(kept["k"].to_pylist()[:1])
            self.lake.rewrite(some, [pa.concat_tables([kept.slice(1), rows_of(fresh)])], "overwrite")
            self._came(fresh)
        elif what == "update" and some:
            rows = TableRows(self.lake.table)
            first = {path: np.flatnonzero(rows.alive((self.lake.now, path)))[:1].tolist() for path in some}
            dead = {path: at for path, at in first.items() if at}
            again = [k for path, at in dead.items() for k in read(path)["k"].to_numpy()[at].tolist()]
            if dead:
                self.lake.rewrite([], [rows_of(again + fresh, v=1)], "overwrite", dead)
                self._came(fresh)
        if self.lake.table.current_snapshot():
            self.live[self.lake.now] = set(self.keys)

    def _came(self, fresh: list[int]) -> None:
        self.next += len(fresh)
        self.keys |= set(fresh)
        self.brought |= set(fresh)

    def expire_some(self, every: int) -> None:
        """Expire some of the snapshots in between."""
        between = [
            s.snapshot_id for s in self.lake.table.snapshots() if s.snapshot_id not in (self.since, self.lake.now)
        ]
        if every and between:
            self.lake.expire(*between[::every])

    def check(self, history: History, *, exact: bool) -> None:
        """Check that the history agrees with the model."""
        before, after = self.live[self.since], self.keys
        found, gone = self.lake.new(history), self.lake.gone(history)
        assert len(found) == len(set(found)), "a row came twice"
        assert set(found) >= after - before, "a new row is not read"
        assert set(found) <= (after - before if exact else self.brought), "a row is read that is not new"
        assert gone == before - after or (not exact and gone is None)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lakehouse in which every example makes a new table."""
    return Lake(tmp_path_factory.mktemp("shelf") / "home")


SLOW = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def new_story(shelf: Lake) -> Story:
    """A story of a new table."""
    return Story(shelf.create(f"src.t{len(shelf.lakehouse.catalog.list_tables('src'))}"))


@pytest.mark.parametrize("keyed", [True, False])
@SLOW
@given(changes=CHANGES, expiry=st.integers(0, 3))
def test_any_history_gives_new_rows(shelf: Lake, keyed: bool, changes: list[Change], expiry: int) -> None:
    """Keys give exactly the new and deleted rows, also past expiry. Without, as no overwrite is in it, deleted may be unknown."""
    story = new_story(shelf)
    for change in changes:
        if keyed or change[0] not in ("delete", "overwrite", "update"):
            story.tell(*change)
    assert shelf.keys() == story.keys
    story.expire_some(expiry)
    try:
        history = (
            shelf.changes(story.since, "identity_columns", on_overwrite="read") if keyed else shelf.changes(story.since)
        )
    except AppendHistoryLost:
        assert expiry, "history was lost though all of it is there"
        return
    story.check(history, exact=keyed)


@SLOW
@given(changes=CHANGES, keyed=st.sampled_from(["appends", "identity_columns"]))
def test_any_history_with_overwrites_ignored(shelf: Lake, changes: list[Change], keyed: Keyed) -> None:
    """With overwrites ignored every row that was appended and not deleted is read once, and only deleted ones are gone."""
    story = new_story(shelf)
    appended, deleted = set[int](), set[int]()
    for change in changes:
        before, first = set(story.keys), story.next
        story.tell(*change)
        if change[0] == "append":
            appended |= set(range(first, story.next))
        if change[0] in ("delete", "delete_rows", "drop"):
            deleted |= before - story.keys
    history = shelf.changes(story.since, keyed, on_overwrite="ignore")
    found, gone = shelf.new(history), shelf.gone(history)
    assert len(found) == len(set(found)), "a row came twice"
    assert appended - deleted <= set(found) <= appended
    assert gone is None or gone <= deleted & story.live[story.since]
