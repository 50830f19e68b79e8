"""Rows of a step, computed from the order: what the training function saw, for legs of every kind."""

from collections import Counter

import pytest

from dlac_pipeline.extensions.replay.step_rows import StepRow, StepRows
from dlac_pipeline.lakehouse.errors import NoSuchJobSpec
from dlac_pipeline.spec.job_spec import read_spec
from tests.integration import audit_runs
from tests.integration.audit_runs import Workshop, tokens_of


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
    committed = {step: seen for step, seen in workshop.seen[run].items() if step <= steps.steps.last}
    assert len(committed) > 20
    column = "tokens" if run == "packed" else "row_id"
    chosen = {step: seen for step, seen in committed.items() if run != "packed" or step % 4 in (0, 1)}  # by checkpoints
    assert [step for step, seen in chosen.items() if seen_in(run, steps.of(step, column=column)) != seen] == []


def test_packed_steps_need_job_spec(workshop: Workshop) -> None:
    """A packed leg is read again, with the spec of its launch or another one."""
    trained(workshop, "packed")
    with pytest.raises(NoSuchJobSpec, match="--spec FILE"):
        StepRows(workshop.lakehouse, "packed").of(1)
