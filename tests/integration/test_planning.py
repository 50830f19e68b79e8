import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, LongType, NestedField, StringType
from sqlalchemy.exc import OperationalError

from dlac_pipeline.lakehouse.errors import (
    DlacError,
    EmptyPlan,
    FormatTooNew,
    LakehouseError,
    NoSuchColumn,
    NoSuchSnapshot,
    NoSuchTable,
    PinLost,
    SpecInvalid,
    TokenizerUnreadable,
    TransformFailed,
    UnsupportedColumn,
)
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.iceberg.pins import remove_pin
from dlac_pipeline.lakehouse.iceberg.snapshots import pin, pin_tag
from dlac_pipeline.lakehouse.ledger import plans
from dlac_pipeline.plan.legs.choice import check_readable
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec, parse_spec
from tests.conftest import Arena


def source(**changes: object) -> SourceSpec:
    """The source that tests read, with some settings replaced."""
    return SourceSpec.model_validate({"table": "src.t", "columns": ["row_id", "x"], **changes})


@pytest.fixture(autouse=True)
def small_table(arena: Arena) -> None:
    """Two data files of three row groups each."""
    arena.table(appends=(30, 30), row_group_rows=10)


def test_plan_pins_and_lists_row_groups(arena: Arena) -> None:
    """The plan names the tagged snapshot, and one work unit per row group, with all rows live."""
    plan = make_plan(arena.lakehouse, source())
    refs = arena.lakehouse.load("src.t").refs()
    assert refs[plan.row.tag].snapshot_id == plan.row.snapshot_id == refs["main"].snapshot_id
    assert (plan.row.units, plan.row.rows, plan.row.live_rows) == (6, 60, 60)
    assert plan.units.rows.tolist() == [10] * 6
    assert plan.units.first_row.tolist() == [0, 10, 20] * 2


def test_racing_planners_leave_one_plan(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two planners that both saw no plan write one plan row between them, and both use the plan that was committed."""
    barrier, real = threading.Barrier(2, timeout=60), plans.write_plan

    def together(*args: object) -> plans.PlanRow:
        barrier.wait()
        return real(*args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr("dlac_pipeline.plan.planner.write_plan", together)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda _: make_plan(connect(arena.lakehouse.config), source()).row, range(2))]
    assert found[0] == found[1]
    assert len(arena.lakehouse.own("plans").scan().to_arrow()) == 1
    assert len(Plans(arena.lakehouse).load(found[0].plan_id).units) == 6


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"table": "src.tt"}, NoSuchTable, r"'src\.tt'.* did you mean 'src\.t'\?"),
        ({"version": 42}, NoSuchSnapshot, r"snapshot 42 .* found only \[\d+, \d+\]"),
        ({"columns": ["x", "rowid"]}, NoSuchColumn, r"in columns of source 'src.t', .* did you mean 'row_id'\?$"),
        ({"columns": ["even"], "ragged": ["even"]}, UnsupportedColumn, r"'even'"),
        (
            {"exclude": ["even = true", "even = false"]},
            EmptyPlan,
            r"exclusions \['even = true', 'even = false'\] leave none",
        ),
        ({"row_filter": "row_id >"}, SpecInvalid, r"found 'row_id >'"),
    ],
)
def test_what_cannot_be_planned_is_named(
    arena: Arena, changes: dict[str, object], error: type[DlacError], message: str
) -> None:
    """A source that cannot be planned is refused with what was asked for and what there is; no plan row is written."""
    with pytest.raises(error, match=message):
        make_plan(arena.lakehouse, source(**changes))
    assert len(arena.lakehouse.own("plans").scan().to_arrow()) == 0


def test_a_column_of_lists_of_text_is_refused(arena: Arena) -> None:
    """Lists become tensors only if their elements do."""
    schema = Schema(
        NestedField(1, "words", ListType(2, StringType(), element_required=False)), NestedField(3, "n", LongType())
    )
    arena.lakehouse.catalog.create_table("src.words", schema)
    with pytest.raises(NoSuchSnapshot, match="a current snapshot"):
        make_plan(arena.lakehouse, source(table="src.words", columns=["n"]))
    rows = arena.lakehouse.load("src.words").schema().as_arrow().empty_table()
    arena.lakehouse.load("src.words").append(rows)
    with pytest.raises(UnsupportedColumn, match="words"):
        make_plan(arena.lakehouse, source(table="src.words", columns=["words"]))


def test_a_pin_that_names_another_snapshot_is_noticed(arena: Arena) -> None:
    """A moved tag is never trusted, by a plan, a new pin or the removal of one. A plan without its tag is refused as well."""
    first, second = (snapshot.snapshot_id for snapshot in arena.lakehouse.load("src.t").snapshots())
    plan = make_plan(arena.lakehouse, source(version=second))
    arena.lakehouse.load("src.t").manage_snapshots().create_tag(first, pin_tag(second)).commit()
    with pytest.raises(PinLost, match=str(first)):
        Plans(arena.lakehouse).load(plan.row.plan_id)
    with pytest.raises(PinLost, match=str(first)):
        pin(arena.lakehouse, "src.t", second)
    with pytest.raises(PinLost, match="another program moved it"):
        remove_pin(arena.lakehouse, "src.t", second)
    arena.lakehouse.load("src.t").manage_snapshots().remove_tag(plan.row.tag).commit()
    with pytest.raises(PinLost, match="no such tag"):
        Plans(arena.lakehouse).load(plan.row.plan_id)
    with pytest.raises(SpecInvalid, match="'p0'"):
        Plans(arena.lakehouse).load("p0")


def test_units_whose_answer_was_lost_are_written_once(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append of work units lands, the connection breaks: the repeat finds them and writes nothing."""
    real = SqlCatalog.commit_table
    broken: list[bool] = []

    def commit_table(self: SqlCatalog, table: Any, *request: Any) -> Any:
        response = real(self, table, *request)
        if table.name()[-1] == "work_units" and not broken:
            broken.append(True)
            raise OperationalError("UPDATE", {}, Exception("the answer is lost"))
        return response

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    plan = make_plan(arena.lakehouse, source())
    assert broken
    assert len(plan.units) == plan.row.units == 6


def test_plan_with_extra_units_is_refused(arena: Arena) -> None:
    """Work units that another program added are an error, and their rows are not read twice."""
    plan = make_plan(arena.lakehouse, source())
    units = plans.read_units(arena.lakehouse, plan.row)
    plans.append_own(arena.lakehouse, "work_units", units.slice(0, 1), unless=lambda: False)
    with pytest.raises(LakehouseError, match=r"expected 6 work units .* found 7"):
        plans.read_units(arena.lakehouse, plan.row)


def test_tables_of_a_newer_format_are_refused(arena: Arena) -> None:
    """A table of a newer format version is not read, let alone written."""
    with arena.lakehouse.own("plans").transaction() as transaction:
        transaction.set_properties({"dlac.format-version": "99"})
    with pytest.raises(FormatTooNew, match=r"'plans' has format version 99.*upgrade"):
        make_plan(arena.lakehouse, source())


UNREADABLE: list[tuple[dict[str, Any], type[DlacError], str]] = [
    ({"identity_columns": ["row_id", "nowhere"]}, NoSuchColumn, r"in identity_columns of source 'src.t', .*'nowhere'"),
    ({"identity_columns": ["x"]}, SpecInvalid, "identity column 'x' to be of a primitive type"),
    ({"transform": "nowhere.py:f"}, TransformFailed, "'nowhere.py'"),
    ({"sequences": {"length": 4, "column": "x"}}, UnsupportedColumn, "'x' of source 'src.t' to hold texts or lists"),
    (
        {"columns": ["name"], "sequences": {"length": 4}},
        SpecInvalid,
        "sequences.tokenizer for the texts in column 'name'",
    ),
    ({"sequences": {"length": 4, "tokenizer": "nowhere.json"}}, TokenizerUnreadable, "'nowhere.json'"),
    ({"mixture": [{"table": "src.t", "name": "b", "columns": ["row_id"]}]}, UnsupportedColumn, "'src.t' and .* 'b'"),
]
"""Jobs that reading would refuse: the change, the error, and the text in it."""


def test_unreadable_jobs_claim_nothing(arena: Arena) -> None:
    """What reading would refuse is refused by planning and by training, with nothing pinned, planned or claimed."""
    raw = arena.spec("r").model_dump()
    for changes, error, message in UNREADABLE:
        source = {name: value for name, value in changes.items() if name in SourceSpec.model_fields}
        others = {name: value for name, value in changes.items() if name not in source}
        spec = parse_spec({**raw, "source": {**raw["source"], **source}, **others}, origin="the test")
        with pytest.raises(error, match=message):
            check_readable(arena.lakehouse, spec)
        with pytest.raises(error, match=message):
            arena.train(spec)
    assert set(arena.lakehouse.load("src.t").refs()) == {"main"}
    assert arena.lakehouse.own("plans").scan().count() == 0
    assert arena.rows("r") == []


def test_excluded_rows_are_dead(arena: Arena) -> None:
    """Rows that an exclusion names are in the plan's units, and are not read."""
    plan = make_plan(arena.lakehouse, source(exclude=["row_id < 7", "row_id = 59"]))
    assert (plan.row.rows, plan.row.live_rows) == (60, 52)
    found = sorted(
        offsets.tolist() for offsets in plan.units.dead.values()
    )  # the order of the files is that of their names
    assert found == [list(range(7)), [9]]
