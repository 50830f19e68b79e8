"""A script that prints a line and fails with the bug that param `bug` names, at the step `at` or the row `row`."""

import os
import sys
import time

import torch
import torch.distributed as dist

import dlac_pipeline as dlac


def compute(run: dlac.TrainingRun, batch: dlac.Batch, model: torch.nn.Module) -> torch.Tensor:
    """Return the loss of a batch, or fail with the bug."""
    bug, at = run.spec.params["bug"], int(run.spec.params.get("at", "0"))
    if bug == "row" and int(run.spec.params["row"]) in batch["row_id"][batch.valid].tolist():
        raise ValueError(f"the label of step {batch.step} is no number")
    if batch.step == at or (bug == "other_steps" and batch.step == 2 + run.resume_point.attempt):
        print(f"rank {run.rank} is at step {batch.step}", flush=True)
        if bug in ("step", "other_steps"):
            raise ZeroDivisionError(f"no way past step {batch.step}")
        if bug == "rank_1" and run.rank == 1:
            undefined_name  # type: ignore[name-defined]  # noqa: B018, F821 - the bug
        if bug == "exit" and run.rank == run.world_size - 1:
            sys.exit(3)
        if bug == "os_exit" and run.rank == run.world_size - 1:
            os._exit(3)
        if bug == "network":
            raise ConnectionResetError("the tracker is away")
        if bug == "memory":
            torch.empty(2**60)
        if bug == "memory_error":
            bytearray(2**62)
        if bug == "shape":
            return batch.mean(torch.ones(len(batch["x"]) + 1))
    return batch.mean((model(batch["x"].to(torch.float32)).squeeze(-1)) ** 2)


def main() -> None:
    """Train until the bug."""
    with dlac.training_run() as run:
        bug, at = run.spec.params["bug"], int(run.spec.params.get("at", "0"))
        if bug == "secret":
            raise ValueError(f"the tracker refused {os.environ['TRACKER_TOKEN']} and {os.environ['TRACKER']}")
        if bug == "start":
            raise KeyError(f"param {time.time()}")
        model = torch.nn.Linear(4, 1)
        run.restore(dlac.TorchState(model=model))
        for batch in run.batches():
            if bug == "second_attempt" and run.resume_point.attempt > 1:
                raise ValueError("the scratch disk is not empty")
            time.sleep(float(run.spec.params.get("pause_s", "0")))
            loss = compute(run, batch, model)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if run.world_size > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            run.step_done(loss)
            if bug == "between" and batch.step == at:
                raise IndexError("the evaluation has no such metric")
    if bug == "afterwards":
        raise RuntimeError("exporting the model failed")


if __name__ == "__main__":
    if "IMPORT_BUG" in os.environ:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401 - the bug
    main()
