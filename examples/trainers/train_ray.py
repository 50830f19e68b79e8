"""Ray Train with one or two workers, as many as the cluster has room for: `python train_ray.py`."""

import os
import time
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel

import dlac_pipeline as dlac


def train(config: dict[str, str]) -> None:
    """Train on one worker, which Ray has made a rank of a process group."""
    with dlac.training_run(config["job"]) as run:
        network = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        model = DistributedDataParallel(network) if run.world_size > 1 else network
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.restore(model=network, optimizer=optimizer)  # the last committed checkpoint, of any number of workers
        for batch in run.batches():
            loss = batch.mean((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            time.sleep(0.03)  # slow enough to be killed by hand


if __name__ == "__main__":
    home = os.environ.get("DLAC_HOME") or str(
        Path(".dlac").resolve()
    )  # workers have folders and variables of their own
    trainer = TorchTrainer(
        train,
        train_loop_config={"job": str(Path("job.toml").resolve())},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=2),
        run_config=RunConfig(
            storage_path=str(Path("ray").resolve()),
            failure_config=FailureConfig(max_failures=10),
            worker_runtime_env={"env_vars": {"DLAC_HOME": home, "OMP_NUM_THREADS": "1"}},
        ),
    )
    trainer.fit()
