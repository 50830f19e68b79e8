"""The door of new legs: the maker of this distribution, and one of another author, keep one contract."""

from pathlib import Path

import pytest

from dlac_pipeline.lakehouse import doors
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.plan.legs import next_leg
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.contract.runs import Run
from tests.extensions.history.history_lake import Lake
from tests.installed import install_distribution

_PLAIN = """
from dataclasses import replace

def change(plans, spec, leg, request, *, step, state):
    ended = leg.order({each: plans.read(each).units for each in leg.plan_ids}).sources
    wanted = zip(request.requested.sources, ended, state, strict=True)
    sources = tuple(replace(source, start=order.finish_at(cursors)) for source, order, cursors in wanted)
    return replace(request.requested, index=leg.index + 1, start_step=step, sources=sources)
"""


def requested(batch_size: int) -> JobSpec:
    """Return a spec with batches of this size."""
    source = {"table": "src.t", "columns": ["k"]}
    order = {"batch_size": batch_size, "key_groups": 2, "passes": 1}
    launch = {"script": "x", "world_size": 1}
    return parse_spec({"run": "r", "source": source, "order": order, "launch": launch}, origin="the test")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run over 16 rows, in batches of 2."""
    lake = Lake(tmp_path / "home").create("src.t")
    lake.append(*range(16))
    return Run.begin(lake.lakehouse, requested(2))


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a maker of another distribution in place of this distribution's."""
    (site := tmp_path / "site").mkdir()
    points = {"test.new_legs": ["next = plain_legs:change"]}
    monkeypatch.syspath_prepend(str(install_distribution(site, "plain", {"plain_legs": _PLAIN}, points)))
    monkeypatch.setattr(next_leg, "NEW_LEGS", Door("test.new_legs", "maker of new legs"))


@pytest.mark.parametrize("maker", ["own", "plain"])
def test_new_leg_reads_remaining_rows(maker: str, run: Run, request: pytest.FixtureRequest) -> None:
    """The new leg begins at the committed step, with the requested settings, and repeats no row."""
    if maker == "plain":
        request.getfixturevalue("plain")
    run.attempt(steps=3)
    assert run.turn(requested(4), repin=False)
    assert (run.leg.index, run.leg.start_step, run.leg.batch_size) == (1, 3, 4)
    run.attempt(steps=None)
    assert sorted(k for batch in run.batches for k in batch.tensors["k"][batch.valid].tolist()) == [*range(16)]


def test_only_changed_leg_needs_maker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed maker a run resumes while its leg stays. A change is refused with the missing part's name."""
    monkeypatch.setattr(doors, "entry_points", lambda **selected: ())
    assert not run.turn(requested(2), repin=False)
    with pytest.raises(BadInput, match=r"maker of new legs in the next leg, found 'next': installed are none"):
        run.turn(requested(4), repin=False)
