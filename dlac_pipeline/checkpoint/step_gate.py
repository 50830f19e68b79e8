"""Gate in front of the steps of a state's optimizers. See docs/design/0003-checkpoints.md."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any

import torch
from torch.nn import Module

from dlac_pipeline.checkpoint.stage.watch import Key, Watch, plain_tensors, storage_key

_LEAST_BYTES = 1 << 16
"""Smaller storages are copied at once, which takes less time than to watch them."""


class StepGate:
    """The gate of an engine: an optimizer's step, which alone changes its tensors, waits for the copies of them."""

    def __init__(self, engine: object = None) -> None:
        """A user's own adapter may name no optimizers. Then nothing is stable."""
        self._modules: Callable[[], Mapping[str, Any]] = getattr(engine, "modules", dict)
        self._optimizers: list[Any] = []
        optimizers = getattr(engine, "optimizers", None)
        for each in optimizers() if callable(optimizers) else ():
            with suppress(AttributeError, TypeError):  # a wrapper that torch did not make
                each.register_step_pre_hook(self._begin_step)
                if getattr(type(each).step, "hooked", False):  # else its step calls no hook
                    self._optimizers.append(each)
        self._waits: list[Callable[[], bool]] = []
        self._lock = RLock()
        self._watch: Watch | None = None
        self.is_sure: bool | None = None
        """True once a step has changed nothing before the gate, False once anything has."""
        self._has_begun = False
        """True once an optimizer has begun its step, until the next `request_batch`."""

    def request_batch(self) -> None:
        """Note that the script requests the next batch: its optimizers have done their steps."""
        self._has_begun = False

    @contextmanager
    def before_step(self) -> Iterator[bool]:
        """Let optimizers wait. Yield whether none has begun its step since the request for the batch."""
        with self._lock:
            yield not self._has_begun

    def _begin_step(self, *_: object) -> None:
        with self._lock:
            self._has_begun = True
        self.finish(in_step=True)

    def hold(self, wait: Callable[[], bool]) -> None:
        """Call `wait` before the next step of an optimizer, or in `finish`. It returns whether a tensor has changed."""
        self._waits.append(wait)

    def finish(self, *, in_step: bool = False) -> None:
        """Wait for all copies. Only a step shows that nothing else changes the tensors."""
        if not self._waits and self._watch is None:
            return
        with self._lock:  # steps in other threads wait as well
            while self._waits:
                if self._waits[0]():
                    self.is_sure = False
                del self._waits[0]
            watch, self._watch = self._watch, None
            if watch is not None:
                watch.compare()
                if watch.changed or in_step:
                    self.is_sure = self.is_sure is not False and not watch.changed

    def stable(self) -> Mapping[Key, str]:
        """Return the names of tensors by the storages that nothing changes until a step of an optimizer.

        The first call returns none. It begins to watch them until that step.
        """
        if self.is_sure is False:
            return {}
        tensors = [(name, each) for name, each in self._tensors() if _is_worth(each)]
        if self.is_sure is None:
            if self._watch is None and tensors:
                watch = Watch()
                for name, each in tensors:
                    watch.add(name, each)
                self._watch = watch
            return {}
        return {storage_key(each): name for name, each in tensors}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the optimizers, except those in a storage that has a buffer as well."""
        modules = [(part, each) for part, each in self._modules().items() if isinstance(each, Module)]
        names = {each: f"{part}.{name}" for part, module in modules for name, each in module.named_parameters()}
        buffers = {storage_key(each) for _, module in modules for each in plain_tensors([*module.buffers()])}
        for optimizer in self._optimizers:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            held = [(names.get(each, "a parameter"), each) for each in parameters]
            held += [(f"the state of {names.get(each, 'an optimizer')}", own) for each, own in optimizer.state.items()]
            for name, value in held:
                yield from ((name, each) for each in plain_tensors(value) if storage_key(each) not in buffers)


def _is_worth(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is to be watched: a large one, with versions, in host memory or on this rank's accelerator."""
    is_here = tensor.device.type == "cpu" or tensor.device.index == torch.accelerator.current_device_index()
    return is_here and storage_key(tensor)[1] >= _LEAST_BYTES and not tensor.is_inference()
