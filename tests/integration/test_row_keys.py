"""Keys of rows: by which columns, for which files, once, sorted, and what prevents them."""

import datetime as dt
import math
import sys
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType, UUIDType

from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.erasure.seen import who_has_seen
from dlac_pipeline.extensions.history import row_keys
from dlac_pipeline.extensions.upkeep import upkeep
from dlac_pipeline.lakehouse.errors import DataFileUnreadable, SpecInvalid
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.conftest import Arena
from tests.extensions.history.test_history_row_ids import RewrittenTable
from tests.fixtures import Command
from tests.forked import Forked

_KILLED = """
import os, signal, sys
from pathlib import Path
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.plan import planner
from dlac_pipeline.spec.job_spec import SourceSpec

planner.write_plan = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
planner.make_plan(connect(LakehouseConfig().at_home(Path(sys.argv[1]))), SourceSpec.model_validate_json(sys.argv[2]))
"""


def keyed(*columns: str, **more: Any) -> SourceSpec:
    """A source whose rows have keys of these columns."""
    return SourceSpec(
        **{"table": "src.t", "columns": ["row_id"], "row_keys": True, "identity_columns": list(columns), **more}
    )


def places(lakehouse: Lakehouse, *values: str) -> list[int]:
    """The rows in data files that have these values as their identity."""
    return [each["row"] for each in who_has_seen(lakehouse, values)["places"]]


def stored(lakehouse: Lakehouse) -> list[dict[str, Any]]:
    """The keys of rows, without the rows of data files."""
    rows: list[dict[str, Any]] = lakehouse.read_own("row_keys").to_pylist()
    return [row for row in rows if row["key"] is not None]


@pytest.mark.slow
def test_values_of_each_type_are_found(arena: Arena) -> None:
    """A text on the command line finds the row whose value it is, in each type, also by several columns and beside NULL."""
    moment = dt.datetime(2024, 1, 1, 10, 30, 0, 500, tzinfo=dt.UTC)
    ids = [uuid.UUID(int=7), uuid.UUID(int=8), None]
    columns: dict[str, tuple[Any, Sequence[str]]] = {
        "i": (pa.array([-5, 2**31 - 1, None], pa.int32()), ("-5", " 2147483647 ")),
        "b": (pa.array([2**53 + 1, 2**53, None], pa.int64()), ("9007199254740993", "9007199254740992")),
        "s": (pa.array(['it\'s "ü"\n', "NULL", None]), ('it\'s "ü"\n', "NULL")),
        "t": (pa.array([dt.datetime(2024, 1, 1), moment.replace(tzinfo=None), None]), ("2024-01-01", "2024-01-01T10:30:00.0005")),
        "z": (pa.array([moment, moment - dt.timedelta(1), None], pa.timestamp("us", "UTC")),
              ("2024-01-01 12:30:00.0005+02", "2023-12-31T10:30:00.0005Z")),
        "d": (pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1), None]), ("2024-02-29", "0001-01-01")),
        "n": (pa.array([Decimal("1.50"), Decimal("-0.05"), None], pa.decimal128(9, 2)), ("1.5", "-0.050")),
        "f": (pa.array([0.1, 1e300, None]), ("0.1", "1e300")),
        "g": (pa.array([-0.0, 0.1, None], pa.float32()), ("0", "0.1")),
        "h": (pa.array([0.0, math.nan, None]), ("-0.0", "nan")),
        "c": (pa.array([dt.time(0), dt.time(7, 30), None]), ("00:00", "07:30:00")),
        "o": (pa.array([True, False, None]), ("true", "false")),
        "u": (pa.array([each.bytes if each else None for each in ids], pa.binary(16)), tuple(map(str, ids[:2]))),
    }  # fmt: skip
    rows = pa.table({name: column for name, (column, _) in columns.items()})
    arena.lakehouse.catalog.create_table("src.v", rows.schema)
    with arena.lakehouse.load("src.v").update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("u")
        update.add_column("u", UUIDType())
    arena.lakehouse.load("src.v").append(rows)
    for names in [*((name,) for name in columns), ("s", "i")]:
        make_plan(arena.lakehouse, keyed(*names, table="src.v", columns=["b"], nullable=["b"]))
    with open_audit(arena.lakehouse, query="row_keys row_key keyed_files keys_of") as connection:

        def found(*texts: str) -> list[tuple[int]]:
            query = "SELECT k.row FROM keys_of($1) AS w JOIN row_keys AS k ON k.key = w.key WHERE starts_with(w.identity, $2)"
            rows: list[tuple[int]] = connection.execute(query, [texts, f'{{"{name}"']).fetchall()
            return rows

        for name, (_, texts) in columns.items():
            assert [found(text) for text in texts] == [[(0,)], [(1,)]], name
        name = "c"
        assert found("2024-01-31") == []
        name = "s"
        assert (found("NULL", "2147483647"), found("NULL", "-5")) == ([(1,)], [])
        assert connection.execute(
            "SELECT DISTINCT k.row FROM row_keys AS k JOIN keyed_files AS f USING (file) "
            "WHERE k.key IN (row_key(f.salt, f.identity, [NULL]), row_key(f.salt, f.identity, [NULL, NULL]))"
        ).fetchall() == [(2,)]


@pytest.mark.slow
def test_identifier_fields_and_row_ids(arena: Arena) -> None:
    """Without identity columns the identifier fields of the table count, and else v3 row ids, also where a rewrite kept them."""
    fields = NestedField(1, "a", LongType(), required=True), NestedField(2, "row_id", StringType(), required=True)
    arena.lakehouse.catalog.create_table("src.i", Schema(*fields, identifier_field_ids=[2]))
    schema = arena.lakehouse.load("src.i").schema().as_arrow()
    arena.lakehouse.load("src.i").append(pa.table({"a": [1, 2], "row_id": ["x", "y"]}, schema=schema))
    make_plan(arena.lakehouse, keyed(table="src.i", columns=["a"]))
    assert places(arena.lakehouse, "y") == [1]
    hand = RewrittenTable(arena.home / "v3", [Schema(NestedField(1, "k", LongType(), required=False))], version=3)
    planned, appended = hand.add(10, 11, 12), hand.add(13)
    hand.rewrite([planned], {12: 2, 10: 0}, kept=True, operation="replace")
    arena.lakehouse.catalog.register_table("src.v3", hand.write_metadata())
    make_plan(arena.lakehouse, keyed(table="src.v3", columns=["k"], pin="none"))
    found = {row_id: who_has_seen(arena.lakehouse, [str(row_id)], table="src.v3")["places"] for row_id in range(4)}
    assert {row_id: [each["row"] for each in rows] for row_id, rows in found.items()} == {0: [1], 1: [], 2: [0], 3: [0]}
    assert found[3][0]["file_path"] == appended


def test_files_are_keyed_once(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the same files, appended files, and a planner that overtakes another one add no key twice."""
    arena.table(appends=(40, 60))
    first, second = (each.snapshot_id for each in arena.lakehouse.load("src.t").snapshots())
    plan = make_plan(arena.lakehouse, keyed("row_id", version=first))
    assert len(stored(arena.lakehouse)) == 40
    write, other = vars(row_keys)["_dataframe_to_data_files"], connect(arena.config.at_home(arena.home))

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(row_keys, "_dataframe_to_data_files", write)
        make_plan(other, keyed("row_id", columns=["x", "row_id"]))
        return write(*given)

    monkeypatch.setattr(row_keys, "_dataframe_to_data_files", overtaken)
    make_plan(arena.lakehouse, keyed("row_id", version=second))
    assert make_plan(arena.lakehouse, keyed("row_id", version=first)).id == plan.id
    rows = stored(arena.lakehouse)
    assert len(rows) == len({(row["file"], row["row"]) for row in rows}) == 100


def test_killed_planner_leaves_usable_keys(arena: Arena) -> None:
    """A planner that is killed between the keys and its plan leaves keys that the next one does not write again."""
    arena.table(appends=(50,))
    with Forked([sys.executable, "-c", _KILLED, str(arena.home), keyed("row_id").model_dump_json()]) as planner:
        assert planner.wait() == -9
    assert (len(stored(arena.lakehouse)), arena.lakehouse.read_own("plans").num_rows) == (50, 0)
    make_plan(arena.lakehouse, keyed("row_id"))
    assert len(stored(arena.lakehouse)) == 50
    [note] = who_has_seen(arena.lakehouse, ["7"])["notes"]
    assert note.startswith("no checkpoint has seen it: it is row 7 of ")


def test_compaction_keeps_keys_sorted(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep merges the keys of many appends. They are sorted, and answer the same."""
    monkeypatch.setattr(upkeep, "MIN_FILES", 2)
    arena.table(appends=(30,) * 3)
    for each in arena.lakehouse.load("src.t").snapshots():
        make_plan(arena.lakehouse, keyed("row_id", version=each.snapshot_id))
    done = upkeep.compact(arena.lakehouse, "row_keys")
    assert (done.files, done.into) == (3, 1)
    keys = [row["key"] for row in stored(arena.lakehouse)]
    assert (len(keys), keys) == (90, sorted(keys))
    monkeypatch.setattr(own_rows, "LARGE_ROWS", 0)  # the keys are read from files
    assert [places(arena.lakehouse, str(row_id)) for row_id in (31, 89)] == [[1], [29]]


def test_older_plans_are_keyed_later(arena: Arena) -> None:
    """Files of plans without keys make a no uncertain. The next plan with keys adds theirs, unless one cannot be read."""
    table = arena.table(appends=(30, 30, 30))
    make_plan(arena.lakehouse, keyed(row_keys=False))
    lost = next(task.file.file_path for task in table.scan().plan_files())
    table.overwrite(table.scan().to_arrow())
    Path(lost.removeprefix("file://")).unlink()
    make_plan(arena.lakehouse, keyed("row_id"))
    assert len(stored(arena.lakehouse)) == 90 + 60
    notes = who_has_seen(arena.lakehouse, ["1000"])["notes"]
    assert notes[0] == "no checkpoint has seen it: the key is in no keyed data file, or was erased"
    assert notes[1].startswith("unknown for 1 data file of src.t without keys")
    current = next(task.file.file_path for task in arena.lakehouse.load("src.t").scan().plan_files())
    Path(current.removeprefix("file://")).write_bytes(b"PAR1")
    with pytest.raises(DataFileUnreadable):
        make_plan(arena.lakehouse, keyed("x", "row_id", identity_columns=["even"]))


def test_bad_input_is_refused(arena: Arena, here: Command) -> None:
    """Sources without an identity, unknown tables and runs, and texts that are no value."""
    arena.table(appends=(30,))
    with pytest.raises(SpecInvalid, match=r"identify rows of 'src.t' .* set source.identity_columns"):
        make_plan(arena.lakehouse, keyed())
    assert arena.lakehouse.read_own("plans").num_rows == 0
    make_plan(arena.lakehouse, keyed(row_keys=False))
    with pytest.raises(
        SpecInvalid, match=r"expected data files with row keys, found none: .*row_keys = true in \[source\]"
    ):
        who_has_seen(arena.lakehouse, ["7"])
    make_plan(arena.lakehouse, keyed("row_id"))
    for values in (["seven"], ["7", "8"]):
        with pytest.raises(SpecInvalid, match=r'as in \{"row_id": "BIGINT"\}'):
            who_has_seen(arena.lakehouse, values)
    refused = here("seen", "seven", home=arena.home)
    assert (refused.returncode, "BIGINT" in refused.stderr) == (64, True)
