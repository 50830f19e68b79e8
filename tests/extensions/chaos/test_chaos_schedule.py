"""Faults of `dlac chaos`: their notation, their choice by a seed, and when they are due."""

import fcntl
import os
import signal
import sqlite3
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from dlac_pipeline.extensions.chaos.ending_signals import signals_held
from dlac_pipeline.extensions.chaos.faults import (
    KINDS,
    PlannedFault,
    Schedule,
    draw_cascade,
    draw_faults,
    parse_kill,
    parse_seconds,
)
from dlac_pipeline.extensions.chaos.strikes import move_catalog, restore_catalog, way_back
from dlac_pipeline.lakehouse.errors import SpecInvalid, TrainingFailed

pytestmark = pytest.mark.usefixtures("only_this_process")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank@step=120", PlannedFault(kind="rank", at_step=120, is_listed=True)),
        ("rank:3@step=1", PlannedFault(kind="rank", at_step=1, rank=3, is_listed=True)),
        ("supervisor@90s", PlannedFault(kind="supervisor", at_s=90.0, is_listed=True)),
        (" node@1.5m ", PlannedFault(kind="node", at_s=90.0, is_listed=True)),
    ],
)
def test_kill_names_fault_and_moment(text: str, expected: PlannedFault) -> None:
    """A kind or a rank, and a step or a time."""
    assert parse_kill(text) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "KIND@step=N"),
        ("rank@step=-1", "duration"),
        ("rank@step=0", "a step from 1"),
        ("gpu@step=5", "one of rank, ranks"),
        ("supervisor:1@step=5", "rank: or hang: only"),
        ("rank@step=" + "9" * 5000, "duration"),
    ],
)
def test_wrong_kill_is_explained(text: str, found: str) -> None:
    """The message has what was expected and what was found."""
    with pytest.raises(SpecInvalid, match=found) as raised:
        parse_kill(text)
    assert "found" in str(raised.value)


@pytest.mark.parametrize("text", ["", "soon", "-5s", "nan", "25h"])
def test_wrong_duration_is_explained(text: str) -> None:
    """Only numbers with a unit, up to a day, are durations."""
    with pytest.raises(SpecInvalid, match="such as 60s, 5m or 1h"):
        parse_seconds(text)


def test_seed_determines_faults() -> None:
    """The same seed draws the same kinds, targets and times. Another seed draws others."""

    def draw(seed: int) -> list[PlannedFault]:
        return list(islice(draw_faults(list(KINDS), every_s=60, seed=seed, faults=None), 200))

    drawn = draw(7)
    assert drawn == draw(7) != draw(8)
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert 50 < sum(fault.at_s for fault in drawn) / len(drawn) < 70


def test_cascade_has_killing_kinds() -> None:
    """Only kinds that end processes strike during a recovery: a rank where none of the chosen kinds may."""
    head = PlannedFault(kind="store", seed=3)
    assert {fault.kind for fault in draw_cascade(head, ["store", "node", "hang"], 9)} == {"node"}
    assert [fault.kind for fault in draw_cascade(head, ["store"], 3)] == ["rank", "rank"]
    assert draw_cascade(head, ["rank"], 1) == []


def test_schedule_yields_each_fault_once() -> None:
    """Listed faults strike in the order in which they become due, and drawn ones one after another."""
    late, early, timed = parse_kill("rank@step=9"), parse_kill("node@step=3"), parse_kill("hang@5s")
    schedule = Schedule([late, early, timed])
    found = [schedule.take_due(step, trained_s=0.0, healthy_s=0.0) for step in (2, 3, 4, 9)]
    assert found == [None, early, None, late]
    assert not schedule.is_over
    assert schedule.take_due(0, trained_s=5.0, healthy_s=0.0) == timed
    assert schedule.is_over


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Return the file of an SQLite catalog with a table."""
    path = tmp_path / "catalog.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE runs (name TEXT)")
    return path


def has_table(catalog: Path) -> bool:
    """Return whether this is the catalog of the fixture."""
    with closing(sqlite3.connect(catalog)) as connection:
        return connection.execute("SELECT name FROM sqlite_master").fetchall() == [("runs",)]


@pytest.mark.parametrize("stand_in", ["folder", "nothing"])
def test_left_catalog_is_restored(catalog: Path, stand_in: str) -> None:
    """A catalog that a killed command has left aside is moved back, once."""
    catalog.rename(catalog.with_name("catalog.db.aside"))
    if stand_in == "folder":
        catalog.mkdir()
    assert restore_catalog(catalog)
    assert has_table(catalog)
    assert not restore_catalog(catalog)


def test_left_catalog_is_not_overwritten(catalog: Path) -> None:
    """Of two catalogs, one aside and one in its place, a person chooses."""
    aside = catalog.with_name("catalog.db.aside")
    aside.write_bytes(b"the newer one")
    with pytest.raises(SpecInvalid, match="move the other one away"), move_catalog(catalog):
        pass
    with pytest.raises(SpecInvalid, match="move the other one away"):
        restore_catalog(catalog)
    assert aside.read_bytes() == b"the newer one"
    assert has_table(catalog)


def test_outages_exclude_each_other(catalog: Path) -> None:
    """A second command neither ends the outage of a living one nor begins another."""
    with move_catalog(catalog):
        for attempt in (lambda: move_catalog(catalog).__enter__(), lambda: restore_catalog(catalog)):
            with pytest.raises(TrainingFailed, match="another dlac chaos"):
                attempt()
        assert catalog.is_dir()
        assert way_back(catalog) == f"rmdir {catalog} && mv {catalog}.aside {catalog}"
    assert has_table(catalog)
    descriptor = os.open(catalog.parent, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_signals_wait_for_end_of_outage(catalog: Path) -> None:
    """Two signals within the context take effect after it, as one."""
    effects: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda signalled, _: effects.append(signalled))
    try:
        with signals_held() as received, move_catalog(catalog):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            assert (received, effects) == ([signal.SIGHUP, signal.SIGTERM], [])
        assert has_table(catalog)
        assert effects == [signal.SIGHUP]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
