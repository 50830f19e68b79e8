"""Steps that were not applied, under `launch.on_skipped = "replay"`."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.expressions import EqualTo

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import AuditReport, open_run
from dlac_pipeline.audit.lakehouse_sql import rows_of
from dlac_pipeline.extensions.auditors.record import read_audit_record, read_merged
from dlac_pipeline.extensions.poison.poison_rows import rows_in_hand
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.errors import ResumeMismatch, SpecInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import Columns
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import parse_spec, read_spec
from tests.conftest import Arena
from tests.integration.audit_runs import Change, Workshop, changed, check_script_agrees, without

REPLAY = {"script": "x.py", "new_leg": True, "on_skipped": "replay"}


def is_replay(row: Columns) -> bool:
    """Whether a row is a replay."""
    return bool(row["kind"] == "replay")


class Replayed(Workshop):
    """A lakehouse with a run of 100 rows in 7 steps, or as `changes` say."""

    def go(self, skip: Sequence[int] = (), until: int | None = None, **changes: Any) -> None:
        """Train as `train` does."""
        source = {"table": "src.r", "columns": ["row_id"]}
        order = {"batch_size": 16, "key_groups": 4, "seed": 5}
        self.train({"run": "r", "source": source, "order": order, "launch": REPLAY, **changes}, skip=skip, until=until)

    def applied(self, skip: Sequence[int]) -> Counter[int]:
        """Row id -> how often a step that was applied had it."""
        return sum((rows for step, rows in self.seen["r"].items() if step not in skip), Counter[int]())

    def audit(self) -> AuditReport:
        """Return the audit of an exact run."""
        report = check_script_agrees(self.lakehouse, "r")
        assert (report.exact, report.problems) == (True, ())
        return report

    def skipped(self, merge: Callable[[Any], bool] = lambda _: False) -> list[tuple[Any, ...]]:
        """Return the steps that were not applied, as the audit lists them."""
        with open_run(self.lakehouse, "r", query="unapplied_steps", merge=merge) as connection:
            return [tuple(row.values())[1:] for row in rows_of(connection, "FROM unapplied_steps ORDER BY step", [])]


@pytest.fixture
def shop(tmp_path: Path) -> Replayed:
    """A lakehouse without a run."""
    shop = Replayed(tmp_path)
    shop.table("src.r", 0, 100)
    return shop


SECOND = {"table": "src.s", "columns": ["row_id"], "passes": 2, "weight": 0.7}


@pytest.mark.parametrize(
    ("kills", "mixture", "skip", "replays"),
    [
        ((), [], (), {}),
        ((), [], (3, 7), {3: 8, 7: 9}),
        # before the last checkpoint, and twice in the replays, once after a checkpoint
        ((6, 9, 10), [], (2, 5, 7, 9), {2: 8, 5: 11, 7: 10}),
        # one of two sources is read twice, in batches that straddle passes
        pytest.param((11, 18), [SECOND], (4, 5, 7, 16), {4: 17, 5: 18, 7: 19, 16: 20}, marks=pytest.mark.slow),
    ],
)
def test_skipped_rows_are_applied_once(
    shop: Replayed, kills: Sequence[int], mixture: list[Any], skip: Sequence[int], replays: dict[int, int]
) -> None:
    """Each row is in one applied step per pass, a replay has the rows of its step, and audits list the steps, records or not."""
    shop.table("src.s", 1000, 75)
    for until in (*kills, None):
        shop.go(skip, until=until, mixture=mixture)
    times = Counter(range(100)) + Counter(dict.fromkeys(range(1000, 1075), 2 * len(mixture)))
    assert shop.applied(skip) == times
    report = shop.audit()
    assert (report.finished, report.rows_consumed, report.rows_not_applied) == (True, times.total(), 0)
    seen = shop.seen["r"]
    assert all(seen[step] == seen[replay] for step, replay in replays.items())
    listed = [(step, seen[step].total(), replay, True) for step, replay in replays.items()]
    assert shop.skipped() == listed
    dlac.audit_since(shop.lakehouse, "r", record=(record := shop.home / "r.audit"))
    known = read_audit_record(record, "r")
    assert known is not None
    assert shop.skipped(partial(read_merged, path=record, record=known)) == listed
    assert len(StepRows(shop.lakehouse, "r").of(max(seen))) == seen[max(seen)].total()


def test_step_is_replayed_twice_at_most(shop: Replayed) -> None:
    """A step whose replays are all skipped stays not applied: the audit counts its rows, and the run ends."""
    shop.go(skip := (3, 8, 9))
    assert sorted(shop.seen["r"]) == list(range(1, 10))
    assert shop.skipped() == [(3, 16, 9, False)]
    assert (shop.audit().rows_not_applied, shop.applied(skip).total()) == (16, 84)


def test_leg_ends_before_appends_are_read(shop: Replayed) -> None:
    """A launch that finds appended rows, and replays to come, ends the leg with its replays. The next launch reads them."""
    source = {"table": "src.r", "columns": ["row_id"], "follow": "appends"}
    skip = (2, 5)
    shop.go(skip, until=6, source=source)
    shop.table("src.r", 100, 60)
    shop.go(skip, until=8, source=source)
    shop.go(skip, source=source)
    assert (max(shop.seen["r"]), shop.applied(skip)) == (8, Counter(shop.applied(skip).keys()))
    shop.go((*skip, 10), source=source)
    assert max(shop.seen["r"]) == 13
    assert (shop.applied((*skip, 10)), shop.audit().rows_not_applied) == (Counter(range(160)), 0)


def test_deadly_replay_has_rows(shop: Replayed) -> None:
    """The rows in hand of a replay are its step's, once a checkpoint knows that step."""
    shop.go((3,), until=8)
    ledger, spec = Ledger(shop.lakehouse), read_spec(shop.home / "r.yaml")
    leg = leg_of(ledger.rows("r"), ledger.state("r").fence.head or "")
    found = [rows_in_hand(Plans(shop.lakehouse), spec, leg, step=step, folder=shop.home) for step in (3, 8, 9)]
    assert found[0] == found[1] != found[2] == {}


def test_other_leg_waits_for_replays(shop: Replayed) -> None:
    """Settings of the order change when the replays are done, or are left out."""
    shop.go((2,), until=6)
    order = {"batch_size": 32, "key_groups": 4, "seed": 5}
    with pytest.raises(ResumeMismatch, match=r"until the rows of its skipped steps are read again(.|\n)*batch_size"):
        shop.go(order=order)
    shop.go(order=order, launch={**REPLAY, "on_skipped": "count"})
    assert shop.audit().rows_not_applied == 16


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sequences": {"length": 8}}, "sequences.length"),
        ({"source": {"table": "src.r", "columns": ["a"], "transform": "x.py:f"}}, "a transform"),
        ({"launch": {**REPLAY, "replicas": 2}}, "launch.replicas"),
        ({"launch": {**REPLAY, "on_spike": "exclude"}}, 'launch.on_spike = "exclude"'),
        (
            {"source": {"table": "src.r", "columns": ["a"], "passes": 0}, "order": {"batch_size": 16, "steps": 9}},
            "sources without end",
        ),
    ],
)
def test_replays_need_steps_with_known_rows(changes: dict[str, Any], found: str) -> None:
    """A job spec whose skipped steps could not be read again names the setting."""
    source = {"table": "src.r", "columns": ["row_id"]}
    spec = {"run": "r", "source": source, "order": {"batch_size": 16}, "launch": REPLAY, **changes}
    with pytest.raises(SpecInvalid, match=f"without {found}"):
        parse_spec(spec, origin="the test")


def test_trainers_have_no_replays(arena: Arena) -> None:
    """A trainer that has the loop trains a number of steps that it knows when it starts."""
    arena.table(appends=(100,))
    spec = arena.spec("r", world_size=1, on_skipped="replay")
    with arena.training_run(spec) as run, pytest.raises(SpecInvalid, match="whose number of steps is fixed"):
        run.loader()


FORGERIES: list[tuple[Change, str]] = [
    (changed(is_replay, position_end=101), "in a step before step 8 that was not applied"),
    (changed(is_replay, kind="advance"), "found them again"),
    (without(is_replay), "expected the 16 rows of step 3 in step 8, found 12"),
    (lambda rows: [*rows, next(filter(is_replay, rows))], "in one replay, found 8"),
    (lambda rows: [row for row in rows if not is_replay(row)], "expected advances of checkpoint"),
    (lambda rows: [row for row in rows if not is_replay(row)], "expected 1 replays after step 7, found 0"),
    (changed(is_replay, applied=False), "expected rows of 0 steps that were not applied"),
]


def test_audit_finds_forged_replays(shop: Replayed) -> None:
    """Replays of rows that no skipped step had, or twice, and replays that are missing, contradict the ledger."""
    shop.go((3, 6))
    for found, (_, problem) in zip(
        shop.problems_of_each([("r", change, None) for change, _ in FORGERIES]), FORGERIES, strict=True
    ):
        assert any(problem in each for each in found), found


def test_record_covers_replays(shop: Replayed) -> None:
    """A ledger without the replays that an audit recorded is audited again."""
    shop.go((3,))
    assert dlac.audit_since(shop.lakehouse, "r", record=shop.home / "record").exact
    shop.lakehouse.own("consumption").delete(EqualTo("kind", "replay"))  # type: ignore[call-arg,arg-type]  # pydantic hides the real signature
    assert not dlac.audit_since(shop.lakehouse, "r", record=shop.home / "record").exact
