from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlac_pipeline import TorchState
from dlac_pipeline.lakehouse.errors import DataFileUnreadable
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plan, Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.read import streams
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import OrderSpec, SourceSpec
from tests.conftest import Arena

ORDER = OrderSpec(batch_size=24, key_groups=6, block_slices=2, seed=11, passes=2)


@pytest.fixture
def table(arena: Arena) -> None:
    """Many small appends and one large one."""
    arena.table(appends=(3, 1, 7, 110, 2, 14), row_group_rows=20)


def plan_of(arena: Arena, *columns: str, row_filter: str | None = None) -> Plan:
    """A plan of these columns; all of them unless named."""
    return make_plan(
        arena.lakehouse,
        SourceSpec(table="src.t", columns=list(columns or ("row_id", "x", "even")), row_filter=row_filter),
    )


def read(
    arena: Arena, plan: Plan, *, world_size: int = 1, step: int = 0, order: OrderSpec = ORDER, budget_bytes: int = 2**20
) -> list[list[Batch]]:
    """The batches of every remaining step, by rank."""
    spec = arena.spec("r", columns=list(plan.columns), row_filter=plan.row.row_filter or None)
    spec = spec.model_copy(update={"order": order})
    opened = open_leg(Plans(arena.lakehouse), first_leg(spec, [plan]), spec)
    batches = []
    for rank in range(world_size):
        reader = opened.reader(coordinate=DataCoordinate(rank, world_size), step=step, budget_bytes=budget_bytes)
        with closing(reader):
            batches.append(list(reader))
    return batches


def global_batches(by_rank: list[list[Batch]]) -> list[tuple[int, list[int]]]:
    """(step, row ids of its valid samples in slot order)."""
    return [
        (parts[0].step, [row for part in parts for row in part["row_id"][part.valid].tolist()])
        for parts in zip(*by_rank, strict=True)
    ]


@pytest.mark.usefixtures("table")
def test_tensors_hold_the_rows_of_the_table(arena: Arena) -> None:
    """They have the types of the table, and each row is read once per pass."""
    (batches,) = read(arena, plan_of(arena))
    for batch in batches:
        assert [batch[name].dtype for name in ("row_id", "x", "even")] == [torch.int64, torch.float32, torch.bool]
        assert batch.rows == int(batch.valid.sum())
    assert sorted(row for _, ids in global_batches([batches]) for row in ids) == sorted(2 * list(range(137)))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("world_size", [3, 4, 24])
def test_rank_count_keeps_global_batches(arena: Arena, world_size: int) -> None:
    """Also where ranks share key groups, and where one rank has several."""
    plan = plan_of(arena)
    alone, together = read(arena, plan), read(arena, plan, world_size=world_size)
    assert global_batches(together) == global_batches(alone)
    for parts, whole in zip(zip(*together, strict=True), alone[0], strict=True):
        assert torch.equal(torch.cat([part["x"] for part in parts]), whole["x"])
        assert torch.equal(torch.cat([part.valid for part in parts]), whole.valid)
        assert {part.rows for part in parts} == {whole.rows}
        mean = sum(float(part.mean(part["row_id"].double())) for part in parts) / world_size
        assert mean == pytest.approx(float(whole["row_id"][whole.valid].double().mean()))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("portion_bytes", [1, 2**22])
def test_portions_change_no_batch(arena: Arena, monkeypatch: pytest.MonkeyPatch, portion_bytes: int) -> None:
    """In the table's order the batches are the same, from any step, however few slices are decoded at a time."""
    order = ORDER.model_copy(update={"shuffle": False, "block_slices": 4})
    plan = plan_of(arena, row_filter="even = true")
    monkeypatch.setattr(streams, "PORTION_BYTES", 2**40)
    whole = global_batches(read(arena, plan, order=order))
    monkeypatch.setattr(streams, "PORTION_BYTES", portion_bytes)
    for step in (0, 1, 3):
        assert global_batches(read(arena, plan, order=order, step=step)) == whole[step:]


@pytest.mark.parametrize("portion_bytes", [1, 2**40])
def test_portions_pass_dead_nulls_over(arena: Arena, monkeypatch: pytest.MonkeyPatch, portion_bytes: int) -> None:
    """Rows that a filter drops may be null, also where a block is decoded a few slices at a time."""
    monkeypatch.setattr(streams, "PORTION_BYTES", portion_bytes)
    values = pa.array([None if row % 7 == 3 else float(row) for row in range(120)])
    rows = pa.table({"row_id": pa.array(range(120)), "v": values})
    arena.lakehouse.catalog.create_table("src.t", rows.schema, properties={"write.parquet.row-group-limit": "10"})
    arena.lakehouse.load("src.t").append(rows)
    plan = plan_of(arena, "row_id", "v", row_filter="v is not null")
    order = ORDER.model_copy(update={"shuffle": False, "block_slices": 4, "passes": 1})
    found = [
        pair
        for batch in read(arena, plan, order=order)[0]
        for pair in zip(batch["row_id"][batch.valid].tolist(), batch["v"][batch.valid].tolist(), strict=True)
    ]
    assert sorted(found) == [(row, float(row)) for row in range(120) if row % 7 != 3]


def test_table_order_holds_few_slices(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table's order a reader keeps one portion of a block and the next one, and not the block."""
    arena.table(appends=(960,), row_group_rows=20)
    plan = plan_of(arena)
    peaks = {}
    for portion_bytes in (1, 2**40):
        monkeypatch.setattr(streams, "PORTION_BYTES", portion_bytes)
        order = ORDER.model_copy(update={"shuffle": False, "block_slices": 8})
        spec = arena.spec("r", columns=list(plan.columns)).model_copy(update={"order": order})
        with closing(open_leg(Plans(arena.lakehouse), first_leg(spec, [plan]), spec).reader()) as reader:
            rows = 0
            for batch in reader:
                rows += len(batch["row_id"])
                reader.prefetch.settle()
            peaks[portion_bytes] = reader.prefetch.peak_bytes
    assert rows == 2 * 960
    assert peaks[1] < peaks[2**40] / 2


def test_file_with_other_rows_is_named(arena: Arena) -> None:
    """A data file that was overwritten in place with fewer rows does not repeat its last row in silence."""
    arena.table(appends=(200,), row_group_rows=50)
    spec = arena.spec("short", world_size=1, every_steps=1)
    arena.train(spec, until=3)
    path = make_plan(arena.lakehouse, spec.source).units.file_paths[0].removeprefix("file://")
    pq.write_table(pq.read_table(path), path, row_group_size=40)
    with pytest.raises(DataFileUnreadable, match="expected 50 rows in row group"):
        arena.train(spec)


def test_left_loop_of_transformed_rows_goes_on(arena: Arena) -> None:
    """A script that leaves its loop after each step trains on every row once, also where a batch is read ahead."""
    (arena.home / "same.py").write_text("def same(batch):\n    return batch\n")
    arena.table(appends=(100,))
    seen: list[int] = []
    with arena.training_run(arena.spec("r", world_size=1, passes=1, transform=f"{arena.home / 'same.py'}:same")) as run:
        run.restore(TorchState(model=torch.nn.Linear(4, 1)))
        while len(seen) < 100:
            for batch in run.batches():
                seen += batch["row_id"][batch.valid].tolist()
                run.step_done(batch.mean(batch["x"].sum(-1)))
                break
    assert sorted(seen) == list(range(100))
