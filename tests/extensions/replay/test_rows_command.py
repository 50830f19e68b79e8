"""`dlac rows` and `rows_of_step` in SQL: ranks, nodes, and what they refuse."""

import json

import pytest

from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from tests.fixtures import Command, Lake


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


def test_bad_steps_are_refused(lake: Lake) -> None:
    """A step that is not committed, a rank that it had not, and a column that does not exist."""
    steps = StepRows(lake.lakehouse, "reference")
    for step in (0, steps.steps.last + 1):
        with pytest.raises(SpecInvalid, match=f"1 to {steps.steps.last}, found {step}"):
            steps.of(step)
    with pytest.raises(SpecInvalid, match="0 to 1 of step 1, found 2"):
        steps.of(1, rank=2)
    with pytest.raises(NoSuchColumn, match="found 'absent'"):
        steps.of(1, column="absent")
