"""Changes of a table between two snapshots: new rows and where to read them, and removed rows.

A run planned snapshot P (`since`) and continues with N (`until`), which descends from P. The snapshots between them are
walked in order, each by what its manifests did. Where a file of N mixes rows of P with others, v3 row ids or identity columns
tell them apart. Without either, new rows are read in the last snapshot that had them in a file of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from pyiceberg.table import Table

from dlac_pipeline.extensions.history.row_keys import Keys, identity_keys
from dlac_pipeline.extensions.history.row_matching import Mask, match
from dlac_pipeline.extensions.history.steps import Place, Step, TableRows, steps_between
from dlac_pipeline.extensions.history.walk import Found, Walk
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from dlac_pipeline.lakehouse.iceberg.data_files import snapshot_schema
from dlac_pipeline.lakehouse.iceberg.deletes import NO_ROWS, Ints
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of, table_name
from dlac_pipeline.plan.legs.changes import OnOverwrite, Portion


def changes(
    table: Table, since: int, until: int, *, on_overwrite: OnOverwrite = "stop", identity_columns: Sequence[str] = ()
) -> "History":
    """Return the changes from snapshot `since` to snapshot `until`.

    `on_overwrite` decides on an overwrite for a run that follows the table:

    - "stop" raises unless the overwrite provably only removed rows.
    - "read" reads rows that it added and leaves out rows that it removed. Without row ids and identity columns its files are
      read whole: rows that it kept are read again.
    - "ignore" reads nothing of it and leaves nothing out. An overwrite that provably only removed rows is a delete.

    Rows that reappear with a known identity are not new.

    If `until` does not descend from `since`, or new rows cannot be identified, then `History.portions` raises
    `AppendHistoryLost`, and `History.gone` still answers for files that did not move.

    Raises:
        NoSuchSnapshot: the table has no snapshot `until`.
        AppendHistoryLost: `since` is expired.
        SpecInvalid, NoSuchColumn: the identity columns do not tell rows apart, or do not exist.
    """
    if table.snapshot_by_id(since) is None:
        raise AppendHistoryLost(
            f"expected snapshot {since} of {table_name(table)!r}, up to which was planned, found it expired: pin snapshots "
            "with a tag; start a new run"
        )
    snapshot_of(table, until)
    rows = TableRows(table)
    keys = _keys(rows, since, until, identity_columns)
    walk = Walk(rows, since, until, keys, on_overwrite)
    try:
        for step in steps_between(table, since, until):
            walk.take(step)
        found = walk.conclude()
    except AppendHistoryLost as err:
        found = walk.conclude_without_history(err)
    return History(since=since, until=until, _found=found, _rows=rows, _keys=keys)


def _keys(rows: TableRows, since: int, until: int, identity_columns: Sequence[str]) -> Keys | None:
    """Return the keys of rows: the declared identity columns, else row ids where all files have them, else nothing."""
    schema = snapshot_schema(rows.table, until)
    if identity_columns:
        return identity_keys(schema, identity_columns)
    files = [*rows.files(since).values(), *rows.files(until).values()]
    has_ids = rows.table.metadata.format_version >= 3 and all(file.first_row_id is not None for file in files)
    return Keys(schema) if has_ids else None


@dataclass(frozen=True, kw_only=True)
class History:
    """Changes of a table from snapshot `since` to snapshot `until`."""

    since: int
    until: int
    _found: Found = field(repr=False)
    _rows: TableRows = field(repr=False)
    _keys: Keys | None = field(repr=False)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The changes of each snapshot, as far as it was followed."""
        return tuple(self._found.steps)

    @property
    def identified_by(self) -> Literal["row_ids", "identity_columns", "appends"]:
        """The keys that distinguish rows."""
        if self._keys is None:
            return "appends"
        return "identity_columns" if self._keys.columns else "row_ids"

    @property
    def portions(self) -> tuple[Portion, ...]:
        """Return where every new live row is read, once, in order. Raises `AppendHistoryLost` if it cannot be determined."""
        if isinstance(self._found.portions, AppendHistoryLost):
            raise self._found.portions
        return self._found.portions

    def check(self) -> None:
        """Raise what `portions` and `gone` raise, before they are used."""
        _ = self.portions
        if self._moved:
            _ = self._matched

    def gone(self, path: str) -> Ints | None:
        """Return sorted positions of the rows of a data file of `since` that were live then and are not in `until`.

        Return None where it cannot be determined: rows moved to other files, some were deleted there, and they have
        no keys. Then the plan of `since` is finished first.

        Raises:
            SpecInvalid: the identity columns do not tell rows apart.
            AppendHistoryLost: a rewrite did not keep the keys.
        """
        if path in self._found.unsure:
            return None
        away = self._rows.alive((self.since, path)) & ~self._by_place(path)
        if away.any() and path in self._moved:
            away &= ~self._matched[0][path]
        return np.flatnonzero(away)

    def old_rows(self, snapshot_id: int, path: str) -> Ints:
        """Return sorted positions of a portion's rows that were live in `since`, and so are not new. Raises as `gone`."""
        place = (snapshot_id, path)
        return np.flatnonzero(self._matched[1][place]) if place in self._new_places else NO_ROWS

    def _by_place(self, path: str) -> Mask:
        """The rows of a planned file that still are where they were."""
        found = np.zeros(self._rows.files(self.since)[path].rows, dtype=np.bool_)
        for place in self._found.places.get(path, ()):
            if place[1] == path:
                found |= self._alive(place)
        return found

    def _alive(self, place: Place) -> Mask:
        """Rows that are live in a place, and rows that only an ignored overwrite deleted."""
        found = self._rows.alive(place)
        for before, after in self._found.spared:
            if place[1] in self._rows.files(before) and place[1] in self._rows.files(after):
                found |= self._rows.alive((before, place[1])) & ~self._rows.alive((after, place[1]))
        return found

    @cached_property
    def _moved(self) -> frozenset[str]:
        """The planned files whose rows may be in other files now."""
        places = self._found.places.items()
        return frozenset(path for path, found in places if any(place[1] != path for place in found))

    @cached_property
    def _new_places(self) -> frozenset[Place]:
        return frozenset(place for path in self._moved for place in self._found.places[path] if place[1] != path)

    @cached_property
    def _matched(self) -> tuple[dict[str, Mask], dict[Place, Mask]]:
        """The rows of planned files that live on in other files, and where they do, from one join."""
        moved, places = sorted(self._moved), sorted(self._new_places)
        assert self._keys is not None  # without, nothing is followed to other places
        old = [
            self._rows.rows((self.since, path), self._rows.alive((self.since, path)) & ~self._by_place(path))
            for path in moved
        ]
        new = [self._rows.rows(place, self._alive(place)) for place in places]
        in_old, in_new = match(self._rows.table, old, new, self._keys)
        unknown = {one: rows.chosen & ~mask for one, rows, mask in zip(places, new, in_new, strict=True)}
        self._check_kept(unknown)
        return dict(zip(moved, in_old, strict=True)), dict(zip(places, in_new, strict=True))

    def _check_kept(self, unknown: Mapping[Place, Mask]) -> None:
        """Rewritten files may hold no more rows that are new by their keys than came since."""
        pure = sum(int(np.count_nonzero(mask)) for place, mask in unknown.items() if place in self._found.pure)
        mixed = sum(int(np.count_nonzero(mask)) for place, mask in unknown.items() if place in self._found.mixed)
        most = self._found.merged_rows
        if pure or mixed > most:
            raise AppendHistoryLost(
                f"expected a rewrite of {table_name(self._rows.table)!r} since snapshot {self.since} to keep the keys of "
                f"rows ({self.identified_by}), found {pure + mixed} rows with values of their own where {most} at most came "
                "since: declare identity_columns that a rewrite keeps, or start a new run"
            )
