"""Batches of a run for DeepSpeed's PipelineEngine, which loads micro-batches at the first and the last stage."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.read.batch import Batch, place_losses, take_slots

if TYPE_CHECKING:
    from dlac_pipeline.train.training_run import TrainingRun


def pipeline_batches(run: "TrainingRun", engine: Any, inputs: Callable[[Batch], Any]) -> Iterator[Iterator[Any]]:
    """Yield the argument of `engine.train_batch` for each remaining step. Call `run.step_done(loss)` with its result.

    `inputs` makes the pair (inputs, labels) of a micro-batch. DeepSpeed averages the losses of micro-batches and of ranks. So
    the loss function returns the mean over the valid samples times the `weight` of the micro-batch, 1 if the batch is full.

    Raise `SpecInvalid` if the pipeline has other stages than `launch.mesh`, or a rank's batch has no whole micro-batches.
    """
    parts, mesh = engine.micro_batches, run.spec.launch.mesh
    samples = run.spec.order.batch_size // run.coordinate.count
    if engine.num_stages != mesh.pp:
        raise SpecInvalid(
            f"expected launch.mesh.pp = {engine.num_stages}, the stages of DeepSpeed's PipelineModule, found {mesh.pp}: set it, "
            "or make as many stages"
        )
    if samples != parts * engine.micro_batch_size:
        raise SpecInvalid(
            f"expected micro-batches for the {samples} samples of a rank's batch, found {parts} of "
            f"{engine.micro_batch_size}: correct gradient_accumulation_steps and train_micro_batch_size_per_gpu, or "
            "order.batch_size"
        )
    for batch in run.batches():
        yield iter([inputs(part) for part in _cut(batch, parts)] if batch.tensors else ())


def _cut(batch: Batch, parts: int) -> Iterator[Batch]:
    """Yield the slots of a batch in equal micro-batches."""
    width = len(batch.valid) // parts
    for low in range(0, width * parts, width):
        slots = torch.arange(low, low + width)
        part = take_slots(batch, low, low + width)
        yield replace(part, micro_batches=parts, on_mean=place_losses(batch, slots))
