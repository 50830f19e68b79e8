"""Losses and weights that are NaN or infinite: reported, or the end of the run, as `launch.on_nonfinite_loss` states."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import Module

from dlac_pipeline.checkpoint.step_sync import StepSync
from dlac_pipeline.lakehouse.errors import LossNotFinite

_log = logging.getLogger(__name__)
_WAY_OUT = (
    "look at the data and the learning rate from there, exclude rows or go back with `dlac rewind`, then train again; "
    'launch.on_nonfinite_loss = "warn" trains on'
)


class FinitenessCheck:
    """The checks of one rank for NaN and infinity. All ranks have the same verdict on the loss of an applied step."""

    def __init__(self, run: str, policy: Literal["stop", "warn"], warn: Callable[[str], None]) -> None:
        """`warn` is given a sentence, once for each series of such losses."""
        self._run = run
        self._policy = policy
        self._warn = warn
        self._in_series = False

    def check_losses(self, sync: StepSync, *, skipped: Collection[int]) -> None:
        """Check the losses of a step message. Steps that were not applied changed no weight. Raise `LossNotFinite` by policy."""
        first = sync.step - len(sync.losses) + 1
        for step, loss in enumerate(sync.losses, start=first):
            if math.isfinite(loss):
                self._in_series = False
            elif step not in skipped:
                self._report(f"expected a finite loss of run {self._run!r}, found {loss} at step {step}")

    def check_weights(self, engine: object, step: int) -> None:
        """Check this rank's part of the weights. Raise `LossNotFinite` by policy."""
        self.weights_of(engine, step).finish()

    def weights_of(self, engine: object, step: int) -> "WeightsCheck":
        """Return the check of this rank's part of the weights that a checkpoint is about to save.

        The policy "warn" checks none.
        """

        def report(name: str) -> None:
            self._report(f"expected finite weights of run {self._run!r} at step {step}, found others in {name!r}")

        return WeightsCheck(None if self._policy == "warn" else engine, report)

    def _report(self, found: str) -> None:
        if self._policy == "stop":
            raise LossNotFinite(f"{found}; no checkpoint has them, the last committed one is kept: {_WAY_OUT}")
        if not self._in_series:
            self._in_series = True
            _log.warning("%s", found)
            self._warn(found)


class WeightsCheck:
    """The check of an engine's weights."""

    def __init__(self, engine: object, report: Callable[[str], None]) -> None:
        """`engine` may be None: no weights. `report` is given the name of the first weight that is not finite."""
        self._engine = engine
        self._report = report

    def finish(self) -> None:
        """Check the weights as they are now, and report. If all sums are finite, each accelerator is waited for once."""
        weights = list(_weights(self._engine))
        sums: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
        with suppress(NotImplementedError):  # a type without arithmetic, such as float8
            for _, tensor in weights:
                sums[tensor.device].append(tensor.sum().abs().float())
            if all(bool(torch.stack(each).isfinite().all()) for each in sums.values()):
                return
        for name in (name for name, tensor in weights if not is_finite(tensor)):
            self._report(name)
            return


def _weights(engine: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point parameters of an adapter's modules. A user's own adapter may name none."""
    modules: Callable[[], Mapping[str, Any]] = getattr(engine, "modules", dict)
    for part, module in modules().items():
        if isinstance(module, Module):
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:  # a constant of the user's may well be infinite
                    yield f"{part}.{name}", own_part(parameter)


def own_part(parameter: Any) -> Any:
    """Return this rank's part of a parameter, without padding: all of it, a shard of FSDP2, or a partition of ZeRO 3."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        tensor = parameter.detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # At ZeRO 3 the parameter itself may be empty, or gathered. A partition on NVMe has no memory.
    start = dist.get_rank(parameter.ds_process_group) * partition.ds_numel
    numbers = max(0, parameter.ds_numel - start) if partition.status.name == "AVAILABLE" else 0
    return partition.detach()[:numbers]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all numbers are finite, without a copy."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    with suppress(NotImplementedError):
        if math.isfinite(tensor.sum().item()):  # the fastest pass. A sum of finite numbers may overflow
            return True
        # Minimum and maximum propagate NaN.
        return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
    with suppress(NotImplementedError):  # a type without arithmetic, such as float8
        return bool(torch.isfinite(tensor.float()).all())
    return True  # a type that cannot be converted
