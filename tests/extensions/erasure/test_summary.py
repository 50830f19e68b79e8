"""`dlac summary`: the totals of the audit in the form that the public is owed, through forks."""

import json

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.erasure.summary import training_content
from dlac_pipeline.extensions.exchange.fork import fork_run
from tests.conftest import Arena
from tests.fixtures import Command
from tests.integration.audit_runs import Workshop, trained


@pytest.mark.slow
def test_totals_are_those_of_the_audit(arena: Arena, here: Command) -> None:
    """Of a fork with some rows excluded, and of its parent as it was at the fork, as a text that the provider completes."""
    arena.table(appends=(500,))
    arena.table("src.u", appends=(200,))
    arena.train(arena.spec("a", world_size=1, passes=1, every_steps=5), until=14)
    child = arena.spec("b", table="src.u", world_size=1, passes=1, exclude=["row_id < 20"])
    fork_run(arena.lakehouse, child, "a", step=10)
    arena.train(child)
    arena.monkeypatch.delenv("DLAC_HOME")
    found = json.loads(here("summary", "b", "--json", home=arena.home).stdout)
    audits = [audit_run(arena.lakehouse, "b"), audit_run(arena.lakehouse, "a", "10")]
    assert [{**each, "sources": None} for each in found] == [
        {**json.loads(json.dumps(each.to_json(), default=str)), "sources": None} for each in audits
    ]
    for each in found:
        assert sum(source["rows_consumed"] for source in each["sources"]) == each["rows_consumed"]
    assert [each["sources"][0]["source_table"] for each in found] == ["src.u", "src.t"]
    assert [each["sources"][0]["excluded"] for each in found] == [[{"where": "row_id < 20", "since_step": 1}], []]
    text = here("summary", "b", home=arena.home).stdout
    for part in (
        "### Run b",
        "### Run a",
        "`row_id < 20` of src.u, in run b from step 1 on",
        "began with the model of run a at step 10",
        f"{180 + 10 * 32} rows consumed",
        "The audit of the ledger is exact",
    ):
        assert part in text
    assert text.count("To be stated") >= 6


@pytest.mark.slow
def test_later_exclusion_is_dated(arena: Arena, here: Command) -> None:
    """Rows that a rewind excludes were trained on before. The text names the step from which they were not."""
    arena.table(appends=(300,))
    spec = arena.trained("r", world_size=1, passes=2, every_steps=5, until=8)
    rewind_run(arena.lakehouse, "r", nonce="n", target=5, exclude=["row_id < 30 or name = 'a|b'"])
    arena.train(spec)
    arena.monkeypatch.delenv("DLAC_HOME")
    text = here("summary", "r", home=arena.home).stdout
    assert "- `row_id < 30 or name = 'a\\|b'` of src.t, in run r from step 6 on" in text


def test_tokens_of_packed_legs_are_counted(workshop: Workshop) -> None:
    """The places in the sequences of all steps, in legs of two batch sizes."""
    [report] = training_content(workshop.lakehouse, trained(workshop, "packed"))
    with open_audit(workshop.lakehouse) as connection:
        legs = connection.execute(
            "SELECT DISTINCT start_step, per_batch FROM legs WHERE run = 'packed' ORDER BY ALL"
        ).fetchall()
    ends = [start for start, _ in legs[1:]] + [report["step"]]
    places = sum((end - start) * per_batch for (start, per_batch), end in zip(legs, ends, strict=True))
    assert {per_batch for _, per_batch in legs} == {8, 16}
    assert [source["tokens"] for source in report["sources"]] == [16 * places] * 2
