"""A launch of DLAC as a whole: `training_run`, with its checkpoints and its ledger, for benchmarks/paper_parts/trainer.py.

It imports here what `training_run` imports at first use: once for all launches.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
import torch
import yaml

import dlac_pipeline as dlac
import dlac_pipeline.checkpoint.engines.torch_state
import dlac_pipeline.checkpoint.manager
import dlac_pipeline.train.training_run
from benchmarks.paper_parts.model import loss_of, new_model, validation_loss
from benchmarks.paper_parts.trainer import Training


def run_name(training: Training) -> str:
    """Return the name of the run of a training."""
    return Path(training.folder).name


def train(training: Training, launch: int) -> None:
    """Train one launch, with one rank, until its fault or its end."""
    job = training.job
    spec = {
        "run": run_name(training),
        "source": {"table": job.table, "columns": ["row_id", "tokens"]},
        "order": {"batch_size": job.batch_size, "seed": job.seed, "shuffle": job.shuffle, "passes": job.passes},
        "checkpoint": {"every_steps": training.save_every, "mode": "synchronous", "keep_last": 2, "memory": ""},
        "launch": {"script": "-", "world_size": 1},
    }
    file = Path(training.folder) / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    os.environ["DLAC_HOME"] = job.home
    validation = torch.from_numpy(np.load(Path(training.folder).parent / "validation.npy")).long()
    with training.log.open("a") as log, dlac.training_run(file) as run:
        model, optimizer = new_model(training.seed)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        for batch in run.batches():
            optimizer.zero_grad()
            loss = loss_of(model, batch["tokens"].long())
            loss.backward()  # type: ignore[no-untyped-call]
            if batch.step in training.faults[launch : launch + 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            ids = batch["row_id"].tolist()
            entry = {
                "step": batch.step,
                "pass": (batch.step - 1) * job.batch_size // job.rows,
                "loss": loss.item(),
                "ids": ids,
            }
            if batch.step % training.evaluate_every == 0 or batch.step == training.steps:
                entry["validation"] = validation_loss(model, validation)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            run.step_done(loss)
