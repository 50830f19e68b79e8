"""Rows of a step, computed from the order: what the training function saw, for legs of every kind."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from dlac_pipeline.lakehouse.errors import NoSuchColumn, NoSuchJobSpec, SpecInvalid
from dlac_pipeline.operations.step_rows import StepRow, StepRows
from dlac_pipeline.spec.job_spec import read_spec
from tests.integration import audit_runs
from tests.integration.audit_runs import Workshop, tokens_of
from tests.integration.conftest import Command, Lake


def trained(shop: Workshop, run: str) -> StepRows:
    """Train a run of a kind, unless another test did, and return its steps."""
    if run not in shop.seen:
        getattr(audit_runs, run)(shop)
    return StepRows(shop.lakehouse, run, spec=read_spec(shop.home / f"{run}.yaml").resolved(shop.home))


def seen_in(run: str, rows: list[StepRow]) -> Counter[int]:
    """Row id -> samples with it, or tokens of it, as the rows of a step have them."""
    found: Counter[int] = Counter()
    for each in rows:
        count = 1
        if run == "packed":
            row_id = each.value[0] - 1
            count = (tokens_of(row_id) if each.end_item is None else each.end_item) - (each.first_item or 0)
        found[each.value if run != "packed" else row_id] += count
    return found


@pytest.mark.parametrize("run", ["mixed", "packed", "transformed", "followed"])
def test_rows_equal_those_of_tensors(workshop: Workshop, run: str) -> None:
    """Each step has the rows whose values were in its tensors, over legs, kills, exclusions and skipped steps."""
    steps = trained(workshop, run)
    committed = {step: seen for step, seen in workshop.seen[run].items() if step <= steps.last_step}
    assert len(committed) > 20
    column = "tokens" if run == "packed" else "row_id"
    chosen = {step: seen for step, seen in committed.items() if run != "packed" or step % 4 in (0, 1)}  # by checkpoints
    wrong = [step for step, seen in chosen.items() if seen_in(run, steps.of(step, column=column)) != seen]
    assert wrong == []


def test_ranks_and_nodes_are_named(lake: Lake) -> None:
    """A rank has the rows that it wrote into its journal, and its node. A row group that was planned twice has two rows."""
    steps = StepRows(lake.lakehouse, "faulty")
    journal = lake.journal("faulty")
    for step in (1, 24, 25, max(journal)):
        rows = steps.of(step, column="row_id")
        assert sorted(each.value for each in rows) == sorted(journal[step])
        assert [each.slot for each in rows] == sorted(each.slot for each in rows)
        assert all(each.rank == each.slot // 16 for each in rows)
        assert {each.rank for each in rows} == {0, 1}
        assert len({each.node for each in rows}) == 1
        assert rows[0].node


def test_steps_are_listed_and_queried(lake: Lake, here: Command) -> None:
    """The command and the SQL macro show the same rows."""
    listed = here("rows", "reference", "--step", "9", "--rank", "1", "--text", "row_id", "--json", home=lake.home)
    rows = json.loads(listed.stdout)
    assert {row["rank"] for row in rows} == {1}
    query = "SELECT file_path, row FROM rows_of_step('reference', 9) WHERE rank = 1 ORDER BY slot"
    asked = here("sql", query, "--json", home=lake.home)
    assert json.loads(asked.stdout) == [{name: row[name] for name in ("file_path", "row")} for row in rows]
    table = here("rows", "reference", "--step", "9", "--text", "row_id", home=lake.home).stdout
    assert str(rows[0]["value"]) in table
    for step in ("(SELECT 9)", "8 + 1"):
        query = f"FROM rows_of_step('reference', 9) UNION ALL FROM rows_of_step('reference', {step})"
        refused = here("sql", query, home=lake.home)
        assert (refused.returncode, "expected literals" in refused.stderr) == (64, True)


def test_bad_steps_are_refused(lake: Lake, workshop: Workshop) -> None:
    """A step that is not committed, a column that does not exist, and a packed leg without its job spec."""
    steps = StepRows(lake.lakehouse, "reference")
    for step in (0, steps.last_step + 1):
        with pytest.raises(SpecInvalid, match=f"1 to {steps.last_step}, found {step}"):
            steps.of(step)
    with pytest.raises(SpecInvalid, match="0 to 1 of step 1, found 2"):
        steps.of(1, rank=2)
    with pytest.raises(NoSuchColumn, match="found 'absent'"):
        steps.of(1, column="absent")
    trained(workshop, "packed")
    with pytest.raises(NoSuchJobSpec, match="--spec FILE"):
        StepRows(workshop.lakehouse, "packed").of(1)
