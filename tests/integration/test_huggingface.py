"""A Hugging Face Trainer and an Accelerate loop over the dataset: resumed exactly, killed or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dlac_pipeline.dataset import STATE_FILE, DlacDataset, last_checkpoint, open_dataset, trainer_callback
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import ResumeMismatch, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")

KINDS: dict[str, dict[str, Any]] = {
    "rows": {"columns": ["row_id"], "passes": 2},
    "packed": {"columns": ["tokens"], "length": 16},
}
PROGRAM = """
import sys, runpy
sys.path.insert(0, {root!r})
test = runpy.run_path({here!r})
test["train"]({home!r}, {kind!r}, pause_s={pause_s})
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a lakehouse: 240 rows with documents of 1 to 30 tokens, in four files; each document's token is its row."""
    lakehouse = connect(LakehouseConfig().at_home(tmp_path))
    lakehouse.create_namespace("src")
    append(lakehouse, 240)
    return tmp_path


def append(lakehouse: Lakehouse, count: int, start: int = 0) -> None:
    """Append rows."""
    lengths = np.random.default_rng(start).integers(1, 30, count).tolist()
    documents = pa.array([[start + row] * length for row, length in enumerate(lengths)], pa.list_(pa.int32()))
    rows = pa.table({"row_id": range(start, start + count), "tokens": documents})
    properties = {"write.parquet.row-group-limit": "30"}
    lakehouse.catalog.create_table_if_not_exists("src.t", rows.schema, properties=properties)
    lakehouse.load("src.t").append(rows)


def opened(home: Path, kind: str = "rows", **more: Any) -> DlacDataset:
    """The dataset of a test."""
    settings = {"table": "src.t", "batch_size": 8, "key_groups": 4, **KINDS[kind], **more}
    return open_dataset(home=home, **settings)


class Tiny(torch.nn.Module):
    """A model that keeps a journal of what it was trained on."""

    def __init__(self, journal: Path, pause_s: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.journal, self.pause_s = journal, pause_s
        self.step = 0
        self.name = token_hex(4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss; one line for the journal."""
        time.sleep(self.pause_s)
        with self.journal.open("a") as stream:
            stream.write(json.dumps([self.name, self.step, x.tolist()]) + "\n")
        return {"loss": self.layer(x.float().reshape(-1, 1) / 1000).square().mean()}


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What the model takes: the rows, or the tokens."""
    return {"x": batch["row_id"] if "row_id" in batch else batch["tokens"]}


def trainer_of(home: Path, dataset: DlacDataset, pause_s: float = 0.0, **arguments: Any) -> Any:
    """A Trainer that reads through the dataset's own loader."""

    class Exact(transformers.Trainer):  # type: ignore[misc]  # found at run time only
        def get_train_dataloader(self) -> Any:
            return dataset.loader(inputs=inputs, num_workers=self.args.dataloader_num_workers)

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.model.step = self.state.global_step
            return super().training_step(model, *args, **kwargs)

    defaults: dict[str, Any] = {
        "output_dir": str(home / "out"),
        "ignore_data_skip": True,
        "num_train_epochs": 1,
        "save_steps": 5,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "remove_unused_columns": False,
    }
    if dataset.leg.streamed[0]:
        defaults["max_steps"] = 10_000
    args = transformers.TrainingArguments(**{**defaults, **arguments})
    model = Tiny(home / "journal.jsonl", pause_s)
    return Exact(model=model, args=args, train_dataset=dataset, callbacks=[trainer_callback(dataset)])


def train(home: str | Path, kind: str, **arguments: Any) -> int:
    """What a training script does, the first time and every other; returns the last step."""
    home = Path(home)
    checkpoint = last_checkpoint(home / "out")
    dataset = opened(home, kind, state=checkpoint)
    result = trainer_of(home, dataset, dataloader_num_workers=2, **arguments).train(resume_from_checkpoint=checkpoint)
    return int(result.global_step)


def journal(home: Path) -> list[tuple[str, int, Any]]:
    """(model, Trainer's step, what was trained on), in order of time; a line that was cut short left out."""
    lines = (home / "journal.jsonl").read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def consumed(home: Path) -> list[Any]:
    """What the surviving training was trained on, by step: a later model replaces what an earlier one did from its step on."""
    steps: dict[int, list[Any]] = {}
    last = None
    for model, step, rows in journal(home):
        if model != last:
            steps = {known: each for known, each in steps.items() if known < step}
        steps.setdefault(step, []).append(rows)
        last = model
    assert sorted(steps) == list(range(len(steps)))
    return [rows for step in sorted(steps) for rows in steps[step]]


def trains_behind(home: Path, models: int, checkpoints: int) -> bool:
    """Whether the last of so many models has done a step behind the newest of so many checkpoints, which is to be done again."""
    done = [int(path.parent.name.rpartition("-")[2]) for path in (home / "out").glob(f"checkpoint-*/{STATE_FILE}")]
    if len(done) < checkpoints:
        return False
    known = journal(home)
    return len({model for model, _, _ in known}) == models and known[-1][1] >= max(done)


def expected(home: Path, kind: str) -> list[Any]:
    """The batches, read without a Trainer."""
    return [inputs(batch)["x"].tolist() for batch in opened(home, kind)]


@pytest.mark.parametrize(
    ("kind", "kills"),
    [("packed", 1), *(pytest.param(kind, 2, marks=pytest.mark.soak) for kind in KINDS)],
)
def test_a_killed_trainer_resumes_exactly(home: Path, kind: str, kills: int) -> None:
    """SIGKILL, with batches read ahead in two workers. Rows are appended in between: every pinned row comes once a pass."""
    whole = expected(home, kind)
    code = PROGRAM.format(root=str(Path(__file__).parents[2]), here=__file__, home=str(home), kind=kind, pause_s=0.1)
    for models, checkpoints in ((1, 1), (2, 3))[:kills]:
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        while not trains_behind(home, models, checkpoints):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        append(connect(LakehouseConfig().at_home(home)), 10, start=1000 * checkpoints)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        assert train(home, kind) == len(whole)
    assert len({model for model, _, _ in journal(home)}) == kills + 1
    assert len(journal(home)) > len(whole)
    assert consumed(home) == whole


@pytest.mark.soak
def test_a_checkpoint_without_a_state_is_not_complete(home: Path) -> None:
    """The Trainer's newest checkpoint does not count when it was killed before the state was written."""
    dataset = opened(home)
    trainer_of(home, dataset, max_steps=12).train()
    assert last_checkpoint(home / "out") == str(home / "out" / "checkpoint-12")
    (home / "out" / "checkpoint-12" / STATE_FILE).unlink()
    assert last_checkpoint(home / "out") == str(home / "out" / "checkpoint-10")
    with pytest.raises(SpecInvalid, match=r"found .*No such file"):
        trainer_of(home, opened(home)).train(resume_from_checkpoint=str(home / "out" / "checkpoint-12"))
    assert train(home, "rows") == 60
    assert consumed(home) == expected(home, "rows")
    assert last_checkpoint(home / "nowhere") is None


@pytest.mark.soak
def test_accumulated_gradients_are_resumed_exactly(home: Path) -> None:
    """With gradient_accumulation_steps of 3 every optimizer step takes three batches, before and behind a resume."""
    trainer_of(home, opened(home), gradient_accumulation_steps=3, max_steps=9).train()
    assert opened(home, state=last_checkpoint(home / "out")).step == 27
    assert train(home, "rows", gradient_accumulation_steps=3) == 20
    assert consumed(home) == expected(home, "rows")


def test_arguments_that_would_not_be_exact_are_refused(home: Path) -> None:
    """Each is named, with what to set instead."""
    wrong: dict[str, dict[str, Any]] = {
        "ignore_data_skip=True": {"ignore_data_skip": False},
        "save_total_limit of 2": {"save_total_limit": 1},
        "num_train_epochs=1": {"num_train_epochs": 3},
        "gradient_accumulation_steps divides": {"gradient_accumulation_steps": 7},
    }
    for message, arguments in wrong.items():
        with pytest.raises(SpecInvalid, match=message):
            trainer_of(home, opened(home), **arguments).train()


def test_uneven_last_batch_is_refused(home: Path) -> None:
    """On several ranks a Trainer needs last batches of one size; one that is full, or one rank, needs nothing."""

    def begin(kind: str = "rows", **settings: Any) -> None:
        dataset = opened(home, kind, rank=0, **{"passes": 1, "world_size": 2, **settings})
        args = transformers.TrainingArguments(str(home / "out"), ignore_data_skip=True, num_train_epochs=1)
        trainer_callback(dataset).on_train_begin(args, transformers.TrainerState(), None)

    begin()
    short = {"row_filter": "row_id < 237"}
    for settings in ({"world_size": 1}, {"last_batch": "drop"}, {"last_batch": "pad"}, {"steps": 29}):
        begin(**short, **settings)
    for kind, settings in (("rows", short), ("packed", {})):
        with pytest.raises(SpecInvalid, match=r"for a Trainer on 2 ranks, found 'partial'.*give .* last_batch='drop'"):
            begin(kind, **settings)


def test_trainer_with_extra_batches_does_not_save(home: Path) -> None:
    """A batch that somebody else took from the dataset is noticed at the next checkpoint."""
    dataset = opened(home)
    trainer = trainer_of(home, dataset)

    class Greedy(transformers.TrainerCallback):  # type: ignore[misc]  # found at run time only
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            next(iter(dataset))

    trainer.add_callback(Greedy())
    with pytest.raises(TrainingFailed, match=r"batches up to step 6.*found that it is at 5"):
        trainer.train()


def test_trainer_trains_on_rows_alone(home: Path) -> None:
    """237 rows in batches of 8: the last step is trained on 5 rows, before and after a resume in the last batch."""
    settings: dict[str, Any] = {"passes": 1, "row_filter": "row_id < 237"}
    dataset = opened(home, **settings)
    assert trainer_of(home, dataset, max_steps=29, save_steps=29).train().global_step == 29
    dataset = opened(home, **settings, state=last_checkpoint(home / "out"))
    trainer_of(home, dataset).train(resume_from_checkpoint=last_checkpoint(home / "out"))
    trained = consumed(home)
    assert [len(rows) for rows in trained] == [8] * 29 + [5]
    assert sorted(row for rows in trained for row in rows) == list(range(237))


def test_accelerate_loop_trains_on_rows_alone(home: Path) -> None:
    """A prepared loader, the dataset's own or a plain one, delivers the rows and nothing beside them."""
    accelerator = accelerate.Accelerator(cpu=True)
    for own in (True, False):
        dataset = opened(home, passes=1, row_filter="row_id < 237")
        loader = dataset.loader() if own else torch.utils.data.DataLoader(dataset, batch_size=None)
        found = [row for batch in accelerator.prepare(loader) for row in inputs(batch)["x"].tolist()]
        assert sorted(found) == list(range(237))


def test_a_dataset_on_another_snapshot_is_refused(home: Path) -> None:
    """Resuming with a dataset that was opened without the checkpoint's state, after an append: the message says how to."""
    trainer_of(home, opened(home), max_steps=5).train()
    append(connect(LakehouseConfig().at_home(home)), 10, start=1000)
    with pytest.raises(ResumeMismatch, match="state=last_checkpoint"):
        trainer_of(home, opened(home)).train(resume_from_checkpoint=last_checkpoint(home / "out"))


def test_accelerate_leaves_the_loader_as_it_is(home: Path) -> None:
    """Prepared with model and optimizer, saved and loaded with Accelerate's own state: exact."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset, model = opened(home, "packed"), torch.nn.Linear(16, 1)
    loader = dataset.loader(num_workers=2)
    model, prepared = accelerator.prepare(model, loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(dataset)
    for _ in islice(prepared, 6):
        pass
    accelerator.save_state(str(home / "accelerate"))
    rest = [batch["tokens"].tolist() for batch in prepared]
    accelerator.load_state(str(home / "accelerate"))
    assert [batch["tokens"].tolist() for batch in prepared] == rest == expected(home, "packed")[6:]


def test_accelerate_loader_is_observed(home: Path) -> None:
    """A plain DataLoader that Accelerate prepared is one batch ahead; `observe` behind each step keeps the position exact."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = opened(home)
    loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
    for batch in islice(loader, 4):
        assert dataset.step == batch["dlac"]["step"] + 1
        dataset.observe(batch)
    assert dataset.step == 4
    assert [inputs(batch)["x"].tolist() for batch in opened(home, state=dataset.state_dict())] == expected(
        home, "rows"
    )[4:]
