"""Train a small GPT with DeepSpeed ZeRO 1, every row exactly once through any failure.

`make demo` runs it: `dlac train examples/gpt/job.toml --home demo-lakehouse`. Model, optimizer and loop are this file's own. What
DLAC adds are `training_run`, `restore`, `batches` with their `mean`, and `step_done`.
"""

from __future__ import annotations

from typing import Any

import deepspeed
from model import Gpt, GptConfig  # type: ignore[import-not-found]  # beside this file: its folder is on the path

import dlac_pipeline as dlac


def deepspeed_config(samples_per_rank: int, lr: float) -> dict[str, Any]:
    """ZeRO 1 with PyTorch's AdamW, which needs no C++ extension to be built."""
    return {
        "train_micro_batch_size_per_gpu": samples_per_rank,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01, "torch_adam": True}},
        "steps_per_print": 2**31,
    }


def main() -> None:
    """Train from the committed checkpoint, if there is one, to the end of the run."""
    with dlac.training_run() as run:
        model = Gpt(GptConfig.from_params(run.spec.params))
        samples_per_rank = run.spec.order.batch_size // run.world_size
        config = deepspeed_config(samples_per_rank, lr=float(run.spec.params.get("lr", "5e-3")))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        run.restore(engine)
        for batch in run.batches(device=engine.device):
            loss = batch.mean(engine(batch["tokens"]))
            engine.backward(loss)
            engine.step()
            run.step_done(loss)


if __name__ == "__main__":
    main()
