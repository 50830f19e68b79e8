"""The door of histories: the rows that came, went or moved in a table between two snapshots. Extensions bring them.

A leg whose snapshots stay needs none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pyiceberg.table import Table

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.source_names import ICEBERG, split_identifier
from dlac_pipeline.plan.units import Ints

HISTORIES = Door("dlac.histories", "history of changed tables")
OnOverwrite = Literal["stop", "read", "ignore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Files with rows that came since, to be read as they are in one snapshot, but for those in `Changes.old_rows`."""

    snapshot_id: int
    files: frozenset[str]


class Changes(Protocol):
    """Changes of a table from snapshot `since` to snapshot `until`. Rows are named by their positions in a data file, sorted."""

    @property
    def portions(self) -> Sequence[Portion]:
        """Return where every new live row is read, once, in order. Raises `AppendHistoryLost` if it cannot be determined."""

    def old_rows(self, snapshot_id: int, path: str) -> Ints:
        """Return the rows of a portion's file that were live in `since`, and so are not new. Raises as `gone`."""

    def gone(self, path: str) -> Ints | None:
        """Return the rows of a data file of `since` that were live then and are not in `until`, wherever they moved.

        Return None where it cannot be determined. Then the plan of `since` is finished first. Raises `AppendHistoryLost` or
        `SpecInvalid` if the keys of the rows do not tell.
        """

    def check(self) -> None:
        """Raise what `portions` and `gone` raise, before they are used."""


class SourceHistory(Protocol):
    """A way to follow the rows of tables. The name of its entry point is a source format."""

    def __call__(
        self, table: Table, since: int, until: int, *, on_overwrite: OnOverwrite, identity_columns: Sequence[str]
    ) -> Changes:
        """Return the changes from snapshot `since` to snapshot `until`. Of another format, `table` is the mirror.

        Raises:
            NoSuchSnapshot: the table has no snapshot `until`.
            AppendHistoryLost: `since` is expired.
            SpecInvalid, NoSuchColumn: the identity columns do not tell rows apart, or do not exist.
        """


def history_of(identifier: str) -> SourceHistory:
    """Return the history of a source's format, or else of Iceberg, as which all formats are read. Raises as `Door.load`."""
    found = split_identifier(identifier)
    name = found[0] if found and found[0] in HISTORIES.points() else ICEBERG
    history: SourceHistory = HISTORIES.load(name, setting=f"the source format of {identifier!r}")
    return history
