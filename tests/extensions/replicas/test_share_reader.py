import random
from contextlib import ExitStack, closing

import pytest
import torch

from dlac_pipeline.extensions.replicas.share_reader import ShareReader
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.spec.job_spec import OrderSpec, SequenceSpec, SourceSpec
from tests.conftest import Arena

ORDER = OrderSpec(batch_size=24, key_groups=6, block_slices=2, seed=11, passes=2)


def read_alone(opened: OpenLeg) -> list[Batch]:
    """The global batches, as one rank reads them."""
    with closing(opened.reader()) as reader:
        return list(reader)


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_the_global_batch(opened: OpenLeg, seed: int) -> None:
    """Whichever groups are present, and however often a step is refused, their shares in order are the global batch."""
    draw, expected = random.Random(seed), read_alone(opened)
    with ExitStack() as held:
        groups = [held.enter_context(closing(ShareReader(opened))) for _ in range(5)]
        present = list(range(5))
        for whole in expected:
            for _ in range(draw.choice([1, 1, 1, 2])):
                if draw.random() < 0.4:
                    present = sorted(draw.sample(range(5), draw.randint(1, 5)))
                parts = [
                    groups[each].read(whole.step, DataCoordinate(at, len(present))) for at, each in enumerate(present)
                ]
                rows = torch.cat([part["row_id"][part.valid] for part in parts])
                assert rows.tolist() == whole["row_id"][whole.valid].tolist()
                assert {len(part.valid) for part in parts} <= {24 // len(present), -(-24 // len(present))}


def test_uneven_shares_average_to_the_mean(opened: OpenLeg) -> None:
    """The mean over five groups of their shares' losses is the mean over the 24 samples, which five does not divide."""
    whole = read_alone(opened)[0]
    with ExitStack() as held:
        groups = [held.enter_context(closing(ShareReader(opened))) for _ in range(5)]
        parts = [group.read(1, DataCoordinate(at, 5)) for at, group in enumerate(groups)]
    losses = [part.mean(part["x"].double().sum(-1)) for part in parts]
    assert sum(losses) / 5 == pytest.approx(float(whole["x"].double().sum(-1).mean()), rel=1e-12)


def test_last_step_has_no_successor(opened: OpenLeg) -> None:
    """The leg has a batch for each of its steps, and none after the last."""
    last = len(read_alone(opened))
    with closing(ShareReader(opened)) as reader:
        assert reader.has(last)
        assert not reader.has(last + 1)


def test_more_groups_than_samples_are_refused(opened: OpenLeg) -> None:
    """Each group needs a slot of the global batch."""
    with closing(ShareReader(opened)) as reader, pytest.raises(SpecInvalid, match="batch size 24, found 25"):
        reader.read(1, DataCoordinate(0, 25))


def test_packed_leg_is_refused(arena: Arena) -> None:
    """The cursors of packed documents are known only to the ranks that read them."""
    arena.table()
    plan = make_plan(arena.lakehouse, SourceSpec(table="src.t", columns=["x"]))
    spec = arena.spec("r", columns=["x"], ragged=["x"]).model_copy(update={"sequences": SequenceSpec(length=8)})
    opened = open_leg(Plans(arena.lakehouse), first_leg(spec, [plan]), spec)
    with pytest.raises(SpecInvalid, match="packs documents"):
        ShareReader(opened)
