"""Parquet files as a table in their place: partitions, repetition, refusals, and a run that follows new files."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.maintenance import build_registration_sensor, register_job
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.extensions.erasure.forget import plan_forget
from dlac_pipeline.extensions.registration.register import register, registered_tables
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import DataFileChanged, DataFileUnreadable, DlacError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.plan.planner import make_plan
from tests.conftest import Arena
from tests.object_store import ObjectStore

ROWS = 40


def write(folder: Path, name: str, start: int, **columns: Any) -> Path:
    """Write a file of 40 rows with ids from `start`, in two row groups."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = list(range(start, start + ROWS))
    content = {"row_id": ids, "x": [[float(each)] * 4 for each in ids], **columns}
    pq.write_table(pa.table(content), path, row_group_size=20)
    return path


def rows_in(lakehouse: Lakehouse, columns: Sequence[str], table: str = "docs.pages") -> list[dict[str, Any]]:
    """Return the rows of the table as PyIceberg reads them, by id."""
    found = lakehouse.load(table).scan(selected_fields=tuple(columns)).to_arrow().to_pylist()
    return sorted(found, key=lambda row: row["row_id"])


def test_partitioned_folder_is_trained_and_followed(arena: Arena, tmp_path: Path) -> None:
    """A run reads the rows that DuckDB reads, resumes, and follows a file that is registered later."""
    pages = tmp_path / "pages"
    for number, (day, lang) in enumerate([(1, "en"), (1, "de"), (2, "en"), (2, "__HIVE_DEFAULT_PARTITION__")]):
        write(pages, f"day={day}/lang={lang}/a.parquet", number * ROWS)
    write(pages, "day=1/lang=en/_delta_log/x.parquet", 900)
    (pages / "_SUCCESS").touch()
    done = register(arena.lakehouse, "docs.pages", str(pages))
    assert (done.files, done.added_files, done.added_rows) == (4, 4, 4 * ROWS)
    sql = (
        f"SELECT row_id, day, lang FROM read_parquet('{pages}/*/*/a.parquet', hive_partitioning = true) ORDER BY row_id"
    )
    columns = ("row_id", "day", "lang")
    expected = [dict(zip(columns, row, strict=True)) for row in duckdb.execute(sql).fetchall()]
    assert rows_in(arena.lakehouse, columns) == expected
    settings: dict[str, Any] = {"table": "docs.pages", "follow": "appends", "batch_size": 8, "passes": 1}
    spec = arena.spec("pages", world_size=1, columns=["row_id", "x"], row_filter="day < 3 AND lang = 'en'", **settings)
    trained = arena.train(spec, until=5)
    trained |= arena.train(spec)
    assert sorted(row for rows in trained.values() for row in rows) == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]
    write(pages, "day=2/lang=en/b.parquet", 500)
    assert register(arena.lakehouse, "docs.pages", str(pages)).added_files == 1
    assert sorted(row for rows in arena.train(spec).values() for row in rows) == list(range(500, 500 + ROWS))
    assert audit_run(arena.lakehouse, "pages").exact
    run_upkeep(arena.lakehouse, keep=1)
    assert sum(1 for _ in pages.rglob("*.parquet")) == 6


def test_repetition_commits_nothing(arena: Arena, tmp_path: Path) -> None:
    """Without new files there is no snapshot. A dry run makes no table."""
    write(tmp_path, "pages/a.parquet", 0)
    assert register(arena.lakehouse, "docs.pages", f"{tmp_path}/pages", dry_run=True).added_files == 1
    assert list(registered_tables(arena.lakehouse)) == []
    first = register(arena.lakehouse, "docs.pages", f"{tmp_path}/pages")
    again = register(arena.lakehouse, "docs.pages", f"{tmp_path}/pages")
    assert (again.added_files, again.snapshot_id) == (0, first.snapshot_id)
    assert list(registered_tables(arena.lakehouse)) == [("docs.pages", f"file://{tmp_path}/pages")]
    (tmp_path / "pages" / "a.parquet").rename(tmp_path / "pages" / "b.parquet")
    moved = register(arena.lakehouse, "docs.pages", f"{tmp_path}/pages", dry_run=True)
    assert moved.missing == (f"file://{tmp_path}/pages/a.parquet",)


def test_columns_are_united(arena: Arena, tmp_path: Path) -> None:
    """New columns are added, and the wider type wins, in one registration and in the next one."""
    write(tmp_path, "pages/a.parquet", 0, n=pa.array(range(ROWS), pa.int32()))
    write(tmp_path, "pages/b.parquet", 100, n=pa.array(range(ROWS), pa.int64()), lang=["en"] * ROWS)
    register(arena.lakehouse, "docs.pages", f"{tmp_path}/pages/*.parquet")
    write(tmp_path, "pages/c.parquet", 200, n=pa.array(range(ROWS), pa.int32()), score=[0.5] * ROWS)
    register(arena.lakehouse, "docs.pages", f"{tmp_path}/pages/*.parquet")
    found = rows_in(arena.lakehouse, ("row_id", "n", "lang", "score"))
    assert found[0] == {"row_id": 0, "n": 0, "lang": None, "score": None}
    assert found[ROWS] == {"row_id": 100, "n": 0, "lang": "en", "score": None}
    assert found[-1] == {"row_id": 239, "n": 39, "lang": None, "score": 0.5}


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (
            {"a.parquet": {"lang": ["en"] * ROWS}, "b.parquet": {"lang": [1] * ROWS}},
            SpecInvalid,
            r"one type of column 'lang'.*long in '.*b\.parquet' and string in '.*a\.parquet'",
        ),
        ({"row_id=1/a.parquet": {}}, SpecInvalid, r"partition key 'row_id' in the names of folders only"),
        ({"a.parquet": {}, "b.parquet": b"not Parquet"}, DataFileUnreadable, r"a Parquet file at '.*b\.parquet'"),
        ({}, SpecInvalid, r"Parquet files at .*, found none"),
        (
            {"a.parquet": {}, "_delta_log/0.json": b""},
            SpecInvalid,
            r'source\.format = "delta" and source\.table = "/.*/pages"',
        ),
    ],
)
def test_unfit_files_are_refused(
    arena: Arena, tmp_path: Path, files: dict[str, Any], error: type[DlacError], message: str
) -> None:
    """The error names files and columns, and no table is made."""
    pages = tmp_path / "pages"
    pages.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (pages / name).parent.mkdir(exist_ok=True)
            (pages / name).write_bytes(content)
        else:
            write(pages, name, 0, **content)
    with pytest.raises(error, match=message):
        register(arena.lakehouse, "docs.pages", str(pages))
    with pytest.raises(error):
        register(arena.lakehouse, "docs.pages", str(pages / "*.parquet"))
    assert list(registered_tables(arena.lakehouse)) == []


def test_other_table_is_refused(arena: Arena, tmp_path: Path) -> None:
    """A table that owns its files is not mixed with registered files, and neither is a table of another location."""
    arena.table()
    for name in ("one", "two"):
        write(tmp_path, f"{name}/a.parquet", 0)
    with pytest.raises(SpecInvalid, match="one with its own files"):
        register(arena.lakehouse, "src.t", str(tmp_path / "one"))
    register(arena.lakehouse, "docs.pages", str(tmp_path / "one"))
    with pytest.raises(SpecInvalid, match=r"found that of 'file://.*/one'"):
        register(arena.lakehouse, "docs.pages", str(tmp_path / "two"))


def test_changed_file_is_refused(arena: Arena, tmp_path: Path) -> None:
    """Registration and reading find a file that was written again under its name. New files are not added either."""
    path = write(tmp_path, "pages/a.parquet", 0, n=[1] * ROWS)
    register(arena.lakehouse, "docs.pages", str(tmp_path / "pages"))
    spec = arena.spec("pages", world_size=1, table="docs.pages", columns=["row_id", "x"], batch_size=8, passes=1)
    arena.train(spec, until=2)
    time.sleep(0.05)  # the clock of a file system has steps
    write(tmp_path, "pages/a.parquet", 0, n=[2] * ROWS)
    write(tmp_path, "pages/b.parquet", 100, n=[1] * ROWS)
    with pytest.raises(DataFileChanged, match=str(path)):
        register(arena.lakehouse, "docs.pages", str(tmp_path / "pages"))
    with pytest.raises(DataFileChanged, match=str(path)):
        arena.train(spec)
    with pytest.raises(DataFileChanged, match=str(path)):
        make_plan(arena.lakehouse, spec.sources[0])
    with pytest.raises(DataFileChanged, match=str(path)):
        plan_forget(arena.lakehouse, "docs.pages", ["row_id = 3"])


def register_slowly(home: Path, location: str, before: bool) -> None:
    """Register in another process, which is killed before or after its commit."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    real = lakehouse.catalog.commit_table

    def commit_table(*request: Any) -> Any:
        if before:
            os.kill(os.getpid(), 9)
        real(*request)
        os.kill(os.getpid(), 9)

    setattr(lakehouse.catalog, "commit_table", commit_table)  # noqa: B010 - mypy forbids the assignment of a method
    register(lakehouse, "docs.pages", location)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_killed_registration_is_repeated(arena: Arena, tmp_path: Path, before: bool) -> None:
    """SIGKILL around the commit: the next registration leaves each file once in the table."""
    write(tmp_path, "pages/a.parquet", 0)
    location = str(tmp_path / "pages")
    process = multiprocessing.get_context("forkserver").Process(
        target=register_slowly, args=(arena.home, location, before)
    )
    process.start()
    process.join()
    assert process.exitcode == -9
    assert register(arena.lakehouse, "docs.pages", location).added_files == before
    assert len(rows_in(arena.lakehouse, ["row_id"])) == ROWS


@pytest.mark.slow
def test_bucket_is_registered(store: ObjectStore, tmp_path: Path) -> None:
    """Files of a bucket, by a pattern. A key with # is refused: PyIceberg would read another object."""
    (tmp_path / "home").mkdir()
    lakehouse = connect(store.lakehouse(tmp_path / "home"))
    for number in range(3):
        path = write(tmp_path, f"{number}.parquet", number * 100)
        with store.files.open_output_stream(f"lake/pages/day={number}/a.parquet") as stream:
            stream.write(path.read_bytes())
    done = register(lakehouse, "docs.pages", "s3://lake/pages/day=[12]/*.parquet")
    assert (done.added_files, done.added_rows) == (2, 2 * ROWS)
    assert {row["day"] for row in rows_in(lakehouse, ("row_id", "day"))} == {1, 2}
    assert datetime.fromisoformat(lakehouse.load("docs.pages").properties["dlac.registered-until"])
    with store.files.open_output_stream("lake/odd/a.parquet#2.parquet") as stream:
        stream.write(path.read_bytes())
    with pytest.raises(SpecInvalid, match=r"without '\?' and '#'.*a\.parquet#2"):
        register(lakehouse, "docs.odd", "s3://lake/odd")


@pytest.mark.parametrize(
    ("location", "files"),
    [("pages/part-?.parquet", 2), ("pages/*/c d.parquet", 1), ("pages/x[1]#é %20", 1), ("pages", 4)],
)
def test_locations_are_patterns_or_names(arena: Arena, tmp_path: Path, location: str, files: int) -> None:
    """Wildcards match, and a folder whose name has some is itself."""
    for number, name in enumerate(["part-1.parquet", "part-2.parquet", "sub/c d.parquet", "x[1]#é %20/e.parquet"]):
        write(tmp_path / "pages", name, number * 100)
    done = register(arena.lakehouse, "docs.deep.pages", f"{tmp_path}/{location}")
    assert (done.added_files, len(rows_in(arena.lakehouse, ["row_id"], "docs.deep.pages"))) == (files, files * ROWS)
    assert list(registered_tables(arena.lakehouse)) == [("docs.deep.pages", f"file://{tmp_path}/{location}")]


@pytest.mark.slow
def test_sensor_requests_new_files(arena: Arena, tmp_path: Path) -> None:
    """The job registers what the sensor finds. The sensor requests the same files once, and nothing without new ones."""
    write(tmp_path, "pages/a.parquet", 0)
    register(arena.lakehouse, "docs.pages", str(tmp_path / "pages"))
    resource = LakehouseResource(**arena.lakehouse.config.model_dump())
    look: Any = build_registration_sensor(resource)
    assert isinstance(look(), dg.SkipReason)
    write(tmp_path, "pages/b.parquet", 100)
    [first], [second] = look(), look()
    assert first.run_key == second.run_key
    assert register_job.execute_in_process(resources={"lakehouse": resource}).success
    assert isinstance(look(), dg.SkipReason)
    assert len(rows_in(arena.lakehouse, ["row_id"])) == 2 * ROWS


def test_removed_file_is_not_added_again(arena: Arena, tmp_path: Path) -> None:
    """Rows that were deleted from the table stay deleted when the location is registered again."""
    pages = tmp_path / "pages"
    for number, lang in enumerate(["en", "de"]):
        write(pages, f"lang={lang}/a.parquet", number * ROWS)
    register(arena.lakehouse, "docs.pages", str(pages))
    arena.lakehouse.load("docs.pages").delete("lang = 'en'")
    again = register(arena.lakehouse, "docs.pages", str(pages))
    assert (again.added_files, again.removed) == (0, (f"file://{pages}/lang=en/a.parquet",))
    assert len(rows_in(arena.lakehouse, ["row_id"])) == ROWS


def test_warehouse_is_refused(arena: Arena) -> None:
    """Also a folder that contains it, and a pattern below it."""
    warehouse = Path(arena.lakehouse.config.warehouse.removeprefix("file://"))
    for location in (warehouse, warehouse.parent, warehouse / "src" / "*" / "data"):
        with pytest.raises(SpecInvalid, match="outside of the warehouse"):
            register(arena.lakehouse, "docs.pages", str(location))
