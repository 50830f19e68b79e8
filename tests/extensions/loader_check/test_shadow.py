"""`Shadow` in the ranks of a foreign loop that is killed and restarted, and what `dlac shadow` reports of it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.loader_check import Shadow
from dlac_pipeline.extensions.loader_check.shadow.compare import ShadowReport, compare_shadow
from dlac_pipeline.lakehouse.errors import BadInput
from tests.conftest import PROGRAMS, Arena, source_rows
from tests.fixtures import Command
from tests.forked import Forked

SAVED, DIED = 43, 47


def run_loop(
    arena: Arena, *, step: int, die_at: int = 0, forgets: bool = False, newest_first: bool = False
) -> list[int]:
    """Run both ranks of a launch over the present files of the table, and return their exit statuses."""
    scan = arena.lakehouse.load("src.t").scan().plan_files()
    paths = [task.file.file_path.removeprefix("file://") for task in scan]
    files = sorted(paths, key=lambda path: os.stat(path).st_mtime_ns, reverse=newest_first)
    given = {"files": files, "folder": str(arena.home), "step": step, "die_at": die_at, "forgets": forgets}
    command = [sys.executable, str(PROGRAMS / "foreign_loop.py"), json.dumps({**given, "save_at": SAVED})]
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    ranks = [Forked(command, env=each, stderr=subprocess.PIPE, text=True) for each in environments]
    assert [rank.communicate()[1] for rank in ranks] == ["", ""]
    return [rank.returncode for rank in ranks]


def compare(arena: Arena, **changes: Any) -> ShadowReport:
    """Return the comparison with DLAC at the same size of a batch."""
    spec = arena.spec("shadowed", batch_size=20, key_groups=4, passes=1, **changes)
    return compare_shadow(arena.lakehouse, spec, arena.home / "shadow", by="row_id")


def sizes(report: ShadowReport) -> dict[str, Any]:
    """Return the counts of a report."""
    names = ("rows_trained", "repeated", "missing", "outside", "dlac_rows", "dlac_repeated", "dlac_missing", "exact")
    return {name: getattr(report, name) for name in names}


@pytest.mark.parametrize("forgets", [False, True], ids=["exact", "repeats"])
def test_killed_loop_is_compared(arena: Arena, forgets: bool) -> None:
    """After SIGKILL an exact loop has no difference. One whose position forgets three batches repeats them, and DLAC does not."""
    arena.table()
    before = arena.lakehouse.load("src.t").metadata
    assert run_loop(arena, step=0, die_at=DIED, forgets=forgets) == [-signal.SIGKILL] * 2
    assert run_loop(arena, step=SAVED) == [0, 0]
    report = compare(arena)
    repeated = 60 if forgets else 0
    assert sizes(report) == {
        **{"rows_trained": 2000 + repeated, "repeated": repeated, "missing": 0, "outside": 0, "dlac_rows": 2000},
        **{"dlac_repeated": 0, "dlac_missing": 0, "exact": not forgets},
    }
    [restart] = report.restarts
    assert (restart.launch, restart.step, restart.ranks) == (2, SAVED + 1, 2)
    assert len(restart.trained_before) == (20 if forgets else 0)
    assert len(set(restart.with_dlac or [])) == 20
    assert report.notes == []
    if forgets:
        [difference] = report.differences
        assert (difference.launches, difference.steps) == ([2], [SAVED + 1, SAVED + 3])
        assert sorted(difference.row_groups.values()) == [30, 30]
    assert arena.lakehouse.load("src.t").metadata == before
    assert not arena.lakehouse.read_own("plans").num_rows


@pytest.mark.slow
@pytest.mark.parametrize(("newest_first", "kind", "rows"), [(False, "outside", 400), (True, "repeated", 400)])
def test_appended_table_moves_loop(arena: Arena, newest_first: bool, kind: str, rows: int) -> None:
    """A loop that lists the files again reads appended rows, or rows that it has read. DLAC reads the first snapshot."""
    arena.table()
    run_loop(arena, step=0, die_at=DIED, newest_first=newest_first)
    arena.lakehouse.load("src.t").append(source_rows(2000, rows))
    run_loop(arena, step=SAVED, newest_first=newest_first)
    report = compare(arena)
    assert (report.snapshot_rows, report.dlac_rows) == (2000, 2000)
    assert (report.dlac_repeated, report.dlac_missing, report.missing, report.exact) == (0, 0, 0, False)
    [difference] = report.differences
    assert (difference.kind, difference.rows) == (kind, rows)
    assert difference.note == ("400 of them were appended since" if kind == "outside" else "")


@pytest.mark.slow
def test_other_ranks_and_pass_in_progress(arena: Arena) -> None:
    """DLAC resumes with the ranks of each launch. In the middle of the second pass no row of it is missing yet."""
    arena.table(appends=(100,))
    order = [list(range(100)), list(range(100, -1, -1))[1:]]
    steps = [(number, rows[at : at + 20]) for number, rows in enumerate(order) for at in range(0, 100, 20)]
    for start, end, ranks in ((0, 4, 2), (3, 7, 4)):
        for rank in range(ranks):
            shadow = Shadow(arena.home / "shadow", step=start, rank=rank, world_size=ranks)
            for number, rows in steps[start:end]:
                shadow.step(rows[rank::ranks], pass_number=number)
    report = compare(arena)
    assert (report.rows_trained, report.dlac_rows, report.exact) == (140, 140, True)
    assert (report.dlac_repeated, report.dlac_missing) == (0, 0)
    assert report.notes == ["pass 1 has not ended, so its other rows do not count as missing"]
    assert [(each.launch, each.step, each.ranks) for each in report.restarts] == [(2, 4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "ranks", "reason"),
    [
        (2, 2, "the record begins after step 2, and does not say with which row of a pass"),
        (0, 3, "order.batch_size is 20, which the 3 ranks of launch 1 do not divide: set another order.batch_size"),
    ],
    ids=["begun", "ranks"],
)
def test_loop_is_counted_without_dlac(arena: Arena, begin: int, ranks: int, reason: str) -> None:
    """A record that begins later, or with ranks that DLAC cannot have, gives the counts of the loop, and none of DLAC."""
    arena.table(appends=(100,))
    for start, end, first in ((begin, 4, 20 * begin), (3, 5, 40)):
        for rank in range(ranks):
            shadow = Shadow(arena.home / "shadow", step=start, rank=rank, world_size=ranks)
            for row in range(first, first + 20 * (end - start), 20):
                shadow.step(range(row, row + 20)[rank::ranks])
    report = compare(arena)
    assert (report.rows_trained, report.repeated, report.missing, report.exact) == (20 * (5 - begin), 20, 0, False)
    assert [value for name, value in report.to_json().items() if name.startswith("dlac_")] == [None] * 4
    assert [each.with_dlac for each in report.restarts] == [None]
    assert f"DLAC's reader was not run: {reason}" in report.notes


def show(arena: Arena, here: Command, *options: str) -> tuple[int, str]:
    """Return the status and the output of the command."""
    spec = arena.home / "job.yaml"
    spec.write_text(arena.spec("shadowed", batch_size=20, key_groups=4, passes=1).model_dump_json())
    shown = here("shadow", str(spec), str(arena.home / "shadow"), "--by", "row_id", *options)
    return shown.returncode, shown.stdout


@pytest.mark.slow
def test_skipped_rows_are_missing(arena: Arena, home: Path, here: Command) -> None:
    """The command names the row groups of rows that were never read, and ends with status 1."""
    arena.table(appends=(100,), row_group_rows=25)
    with Shadow(home / "shadow", step=0) as shadow:
        for start in range(0, 80, 20):
            shadow.step(range(start, start + 20))
    status, output = show(arena, here)
    assert status == 1
    lines = output.splitlines()
    assert ["missing", "20", "0"] in [line.split() for line in lines]
    [missing] = [line for line in lines if line.startswith("missing in pass 0: 20 rows")]
    assert missing.endswith(".parquet#3; such as 80, 81, 82, 83, 84")
    assert json.loads(show(arena, here, "--json")[1])["missing"] == 20


@pytest.mark.parametrize(
    ("by", "expected"), [("name", "expected integers in column 'name'"), ("row_id", "found 10 repeated values")]
)
def test_bad_comparison_is_refused(arena: Arena, by: str, expected: str) -> None:
    """Columns without integers or with a value twice."""
    arena.table(appends=(100,))
    arena.lakehouse.load("src.t").append(source_rows(90, 20))
    Shadow(arena.home / "shadow", step=0, rank=0, world_size=2).step(range(20))
    with pytest.raises(BadInput, match=re.escape(expected)):
        compare_shadow(arena.lakehouse, arena.spec("shadowed", world_size=1), arena.home / "shadow", by=by)
