"""Nulls and list items that the footers count: planning refuses what training would surely meet, and nothing else."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlac_pipeline.extensions.registration.register import register
from dlac_pipeline.lakehouse.errors import UnsupportedColumn
from dlac_pipeline.plan.legs.choice import plan_sources
from tests.conftest import Arena

_Y = [0.5] * 12 + [None, None] + [0.5] * 6


def planned(arena: Arena, folder: Path, *, statistics: bool = True, **settings: Any) -> int:
    """Plan a table of 20 rows in row groups of 10. Rows 12 and 13 have a null. Return its live rows."""
    (folder / "pages").mkdir(exist_ok=True)
    table = pa.table({"row_id": range(20), "x": [[1.0]] * 20, "y": _Y, "z": [[1]] * 14 + [[1, 2]] + [[3]] * 5})
    pq.write_table(table, folder / "pages/a.parquet", row_group_size=10, write_statistics=statistics)
    register(arena.lakehouse, "docs.pages", str(folder / "pages"))
    spec = arena.spec("r", world_size=1, **{"table": "docs.pages", "columns": ["row_id", "x", "y"], **settings})
    (plan,) = plan_sources(arena.lakehouse, spec)
    return plan.row.live_rows


_NULLS = ("'y'", "found 2 among the 10 rows of row group 1", "a.parquet", 'nullable = ["y"]', "y IS NOT NULL")
_RAGGED = ("'z'", "found 11 values in the 10 rows of row group 1", "a.parquet", 'ragged = ["z"]')


@pytest.mark.parametrize(
    ("settings", "words"),
    [({}, _NULLS), ({"row_filter": "row_id != 12"}, _NULLS), ({"columns": ["z"]}, _RAGGED)],
)
def test_counted_misfit_is_refused(
    arena: Arena, tmp_path: Path, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    """More nulls than dead rows, and lists of several lengths, are refused with file, row group, column, and what to do."""
    with pytest.raises(UnsupportedColumn) as found:
        planned(arena, tmp_path, **settings)
    assert all(word in str(found.value) for word in words), found.value


@pytest.mark.parametrize(
    ("settings", "live_rows"),
    [
        ({"nullable": ["y"]}, 20),
        ({"columns": ["z"], "ragged": ["z"]}, 20),
        ({"columns": ["z"], "exclude": ["row_id = 14"]}, 19),
        ({"exclude": ["row_id IN (12, 13)"]}, 18),
        ({"row_filter": "row_id != 0 AND row_id != 10 AND row_id != 11"}, 17),
        ({"steps": 1}, 20),
        ({"follow": "appends"}, 20),
        ({"statistics": False}, 20),
    ],
)
def test_uncertain_null_is_planned(arena: Arena, tmp_path: Path, settings: dict[str, Any], live_rows: int) -> None:
    """Nulls that a tensor may have, that dead rows may have, that no footer counts, or that the run may not reach."""
    assert planned(arena, tmp_path, **settings) == live_rows


def test_absent_column_is_refused(arena: Arena, tmp_path: Path) -> None:
    """A file without the column has nulls only, whatever its statistics are."""
    (tmp_path / "pages").mkdir()
    pq.write_table(pa.table({"row_id": [100], "x": [[1.0]]}), tmp_path / "pages/b.parquet", write_statistics=False)
    with pytest.raises(UnsupportedColumn, match=r"column 'y', found 1 among the 1 rows.*b\.parquet"):
        planned(arena, tmp_path, row_filter="row_id >= 20")
