"""An Accelerate loop over the dataset: prepared, saved and resumed exactly."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.datasets import Datasets, seen

accelerate: Any = pytest.importorskip("accelerate")


@pytest.mark.slow
def test_accelerate_leaves_the_loader_as_it_is(datasets: Datasets, tmp_path: Path) -> None:
    """Prepared with model and optimizer, saved and loaded with Accelerate's own state: exact."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = datasets.open("packed")
    loader = dataset.loader(num_workers=2)
    _, prepared = accelerator.prepare(torch.nn.Linear(16, 1), loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(dataset)
    for _ in islice(prepared, 6):
        pass
    accelerator.save_state(str(tmp_path / "accelerate"))
    rest = seen(prepared)
    accelerator.load_state(str(tmp_path / "accelerate"))
    assert seen(prepared) == rest == datasets.whole("packed")[6:]


def test_accelerate_loader_is_observed(datasets: Datasets) -> None:
    """A plain DataLoader that Accelerate prepared is one batch ahead; `observe` after each step keeps the position exact."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = datasets.open()
    for batch in islice(accelerator.prepare(DataLoader(dataset, batch_size=None)), 4):
        assert dataset.step == batch["dlac"]["step"] + 1
        dataset.observe(batch)
    assert dataset.step == 4
    assert seen(datasets.open(state=dataset.state_dict())) == datasets.whole("rows")[4:]
