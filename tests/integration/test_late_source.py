"""`place = "late"`: a source whose rows come after all other sources' rows, in any number of attempts."""

from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.dataset import open_dataset
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import Arena
from tests.integration.datasets import Datasets, rows_of


def spec_with(arena: Arena, first: dict[str, Any], *more: dict[str, Any]) -> JobSpec:
    """The job spec of a mixture of `src.t` and further sources."""
    raw = arena.spec("r", world_size=1, every_steps=5).model_dump()
    sources = [{**raw["source"], **each} for each in (first, *more)]
    return parse_spec({**raw, "source": sources[0], "mixture": sources[1:]}, origin="the test")


def test_late_rows_come_last(arena: Arena) -> None:
    """Two passes of a source, and then one of the late one. It is killed in each part, and once where they meet."""
    arena.table(appends=(150, 150))
    arena.table("src.u", appends=(100,))
    spec = spec_with(
        arena, {"passes": 2}, {"table": "src.u", "place": "late", "passes": 1, "row_filter": "row_id < 90"}
    )
    seen: dict[int, list[int]] = {}
    for until in (8, 19, 21, None):
        seen |= arena.train(spec, until=until)
    rows = [row for step in sorted(seen) for row in seen[step]]
    met = -(-600 // 32)  # in this step the key groups leave the first source
    assert sorted(rows) == sorted([*range(300), *range(300), *range(90)])
    later = [row for step in range(met + 1, max(seen) + 1) for row in seen[step]]
    assert len(set(later)) == len(later) > 60
    assert set(later) <= set(range(90))
    assert sum(row >= 90 for step in range(1, met + 1) for row in seen[step]) == 2 * 210
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.finished, report.rows_consumed) == (True, True, 690)


def test_packed_late_documents_come_last(datasets: Datasets) -> None:
    """In each key group, the sequences of the late source's documents follow the first source's."""
    datasets.append("src.late", rows_of(100, start=1000))
    more = [{"table": "src.late", "columns": ["tokens"], "place": "late"}]
    settings: dict[str, Any] = {"columns": ["tokens"], "length": 16, "batch_size": 16, "key_groups": 4}
    batches = [batch["tokens"] for batch in open_dataset(home=datasets.home, table="src.a", mixture=more, **settings)]
    for slot in range(16):
        are_late = [bool((batch[slot] >= 1000).any()) for batch in batches if len(batch) == 16]
        assert are_late == sorted(are_late)
        assert set(are_late) == {False, True}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"place": "late"}, {"place": "late"}),
        ({"passes": 0}, {"place": "late"}),
        ({}, {"place": "late", "passes": 0}),
        ({"follow": "appends"}, {"place": "late", "follow": "appends"}),
    ],
)
def test_late_source_that_never_comes_is_refused(arena: Arena, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Beside a source without an end, without another source, or in a table that grows."""
    with pytest.raises(SpecInvalid, match='expected place = "late" beside a mixed source'):
        spec_with(arena, first, {"table": "src.u", **second})
