"""`dlac summary`: the totals of the audit in the form that the public is owed, through forks."""

from __future__ import annotations

import json

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.summary import training_content
from dlac_pipeline.operations.fork import fork_run
from tests.conftest import Arena
from tests.integration.audit_runs import Workshop, trained
from tests.integration.conftest import Command


@pytest.fixture
def forked(arena: Arena) -> Arena:
    """A run over one table, and a fork of its step 10 over another table, of which some rows are excluded."""
    arena.table(appends=(500,))
    arena.table("src.u", appends=(200,))
    arena.train(arena.spec("a", world_size=1, passes=1, every_steps=5), until=14)
    child = arena.spec("b", table="src.u", world_size=1, passes=1, exclude=["row_id < 20"])
    fork_run(arena.lakehouse, child, "a", step=10)
    arena.train(child)
    arena.monkeypatch.delenv("DLAC_HOME")
    return arena


def test_totals_are_those_of_the_audit(forked: Arena, here: Command) -> None:
    """Of the run, and of its parent as it was at the fork."""
    found = json.loads(here("summary", "b", "--json", home=forked.home).stdout)
    audits = [audit_run(forked.lakehouse, "b"), audit_run(forked.lakehouse, "a", "10")]
    assert [{**each, "sources": None} for each in found] == [
        {**json.loads(json.dumps(each.to_json(), default=str)), "sources": None} for each in audits
    ]
    for each in found:
        assert sum(source["rows_consumed"] for source in each["sources"]) == each["rows_consumed"]
    assert [each["sources"][0]["source_table"] for each in found] == ["src.u", "src.t"]
    assert [each["sources"][0]["excluded"] for each in found] == [["row_id < 20"], []]


def test_summary_is_a_text_to_complete(forked: Arena, here: Command) -> None:
    """It names both runs, what was excluded, the total, and what the provider has to state."""
    text = here("summary", "b", home=forked.home).stdout
    for part in ("### Run b", "### Run a", "`row_id < 20` of src.u", "began with the model of run a at step 10"):
        assert part in text
    assert f"{180 + 10 * 32} rows consumed" in text
    assert "The audit of the ledger is exact" in text
    assert text.count("To be stated") >= 6


def test_tokens_of_packed_legs_are_counted(workshop: Workshop) -> None:
    """Steps x sequences x their length, over all legs."""
    run = trained(workshop, "packed")
    [report] = training_content(workshop.lakehouse, run)
    leg_tokens = report["sources"][0]["tokens"]
    assert leg_tokens == report["sources"][0]["samples"] * 16
    assert report["sources"][0]["steps"] == report["step"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("summary", "b", "--template", "us"), "SpecInvalid"),
        (("summary", "none"), "NoSuchRun"),
        (("summary", "b", "--checkpoint", "7777"), "NoSuchCheckpoint"),
    ],
)
def test_wrong_summary_is_refused(forked: Arena, here: Command, arguments: tuple[str, ...], kind: str) -> None:
    """An unknown template, run or checkpoint."""
    done = here(*arguments, home=forked.home)
    assert (done.returncode, done.stdout) == (64, "")
    assert kind in done.stderr
