import pyarrow as pa
import pytest

from dlac_pipeline.extensions.history.changes import changes
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, NoSuchColumn, SpecInvalid
from tests.extensions.history.history_lake import SCHEMA, Lake, rows_of


def test_identity_columns_must_exist_and_tell_rows_apart(lake: Lake) -> None:
    """A missing identity column and a double identity are errors that name them."""
    since = lake.append(1, 2, 2)
    lake.append(3)
    lake.compact()
    with pytest.raises(NoSuchColumn, match="'nope'"):
        changes(lake.table, since, lake.now, identity_columns=["nope"])
    with pytest.raises(SpecInvalid, match=r"found \{'k': 2\} twice in snapshot \d+ of .*src.t': row 1 of .* and row 2"):
        lake.new(lake.changes(since, "identity_columns"))


def test_several_identity_columns_with_nulls(lake: Lake) -> None:
    """Identity may take several columns of any type; null is a value like others."""
    since = lake.append(1, 2)
    lake.table.append(pa.table([[1, None], [None, "row 1"], [0, 0]], schema=SCHEMA))
    lake.compact()
    history = changes(lake.table, since, lake.now, identity_columns=["k", "name"])
    assert (lake.new(history), lake.gone(history)) == ([1, None], set())


def test_identity_follows_a_renamed_column(lake: Lake) -> None:
    """Identity columns are found by field id: a rename and a drop in between change nothing."""
    since = lake.append(1, 2)
    lake.append(3)
    with lake.table.update_schema() as update:
        update.rename_column("k", "key").delete_column("v")
    [planned] = lake.paths(since)
    rows = rows_of([3, 2]).drop_columns(["v"]).rename_columns(["key", "name"])
    lake.rewrite(lake.paths(), [rows])
    history = changes(lake.table, since, lake.now, identity_columns=["key"])
    gone = history.gone(planned)
    assert gone is not None
    assert gone.tolist() == [0]
    assert history.old_rows(lake.now, lake.paths()[0]).tolist() == [1]


def test_a_rewrite_that_changes_the_identity_is_noticed(lake: Lake) -> None:
    """A compaction that gives rows new identities did not keep the identity columns."""
    since = lake.append(1, 2)
    lake.rewrite(lake.paths(), [rows_of([8, 9])])
    with pytest.raises(AppendHistoryLost, match="found 2 rows with values of their own"):
        lake.gone(lake.changes(since, "identity_columns"))
