"""An accelerator that computes on the CPU, registered through PyTorch's own interface for backends in Python.

`register()` gives this process one device, "fake". Its tensors have a CPU tensor inside and refuse to be mixed with others.
`LOG` lists in order the events of a real device: copies with their stream, waits, and every read for which the host
waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up

LOG: list[str] = []
_CURRENT = ["default"]
_aten = torch.ops.aten


class FakeTensor(torch.Tensor):
    """A tensor on the device. `host` has its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> FakeTensor:
        """Move a CPU tensor to the device."""
        made: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), dtype=host.dtype, device=torch.device("fake")
        )
        made.host = host
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an optional argument
        """Show the values."""
        return f"FakeTensor({self.host!r})"

    def record_stream(self, stream: Any) -> None:
        """Record that another stream uses the memory."""
        LOG.append(f"used on {stream.name}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute on the CPU."""  # torch's stub has no defaults, and it calls without keywords
        kwargs = dict(kwargs or {})
        if func is _aten.copy_.default:
            return _copy(*args)
        if func is _aten._local_scalar_dense.default:
            LOG.append("waited for a number")
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if to_host:
            LOG.append("waited for a copy")
        kwargs |= {"device": "cpu"} if kwargs.get("device") is not None else {}
        made = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        return made if to_host else tree_map(_on_device, made)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    kind = f"to {target.device.type}"
    LOG.append(f"copied {kind} on {_CURRENT[-1]}" if non_blocking else f"waited for a copy {kind} on {_CURRENT[-1]}")
    _host(target).copy_(_host(source))
    return target


def _host(value: Any) -> Any:
    return value.host if isinstance(value, FakeTensor) else value


def _on_device(value: Any) -> Any:
    return FakeTensor(value) if isinstance(value, torch.Tensor) else value


class FakeEvent:
    """The end of the work launched so far."""

    def synchronize(self) -> None:
        """Wait for it."""
        LOG.append("waited for an event")


class FakeStream:
    """A queue of work."""

    def __init__(self, device: Any = None, name: str = "copies") -> None:
        self.name = name

    def __enter__(self) -> FakeStream:
        """Make it the current stream."""
        _CURRENT.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the stream before it."""
        _CURRENT.pop()

    def wait_stream(self, other: FakeStream) -> None:
        """Let later work wait for another stream."""
        LOG.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        """Return an event of this moment."""
        return FakeEvent()


class FakeModule:
    """The counterpart of `torch.cuda` for this device."""

    Stream = FakeStream

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def is_initialized(self) -> bool:
        """Return true."""
        return True

    def is_available(self) -> bool:
        """Return true."""
        return True

    def current_device(self) -> int:
        """Return the only device."""
        return 0

    def device_count(self) -> int:
        """Return one."""
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: object = "fake") -> torch.Tensor:
        """Return the state of the device's generator."""
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = "fake") -> None:
        """Set the state of the device's generator."""
        self.generator.set_state(state)


def register() -> FakeModule:
    """Register the device. Its page-locked memory is only a mark."""
    module = FakeModule()
    set_up("fake", module)
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    library.impl("empty_strided", _empty, "PrivateUse1")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    _KEPT.append(library)
    patched: Any = torch
    patched.Stream = FakeStream
    patched.accelerator.current_stream = lambda device=None: FakeStream(name="default")
    _pin_by_mark()
    return module


_KEPT: list[Any] = []
_PINNED: set[int] = set()


def _empty(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty_strided(size, stride, dtype=dtype))


def _pin_by_mark() -> None:
    """Mark tensors as page-locked, by their memory."""
    empty = torch.empty

    def pin(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        pinned = tensor.clone()
        _KEPT.append(pinned)
        _PINNED.add(pinned.untyped_storage().data_ptr())
        return pinned

    def empty_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return pin(made) if pin_memory else made

    patched: Any = torch
    patched.empty = empty_pinned
    patched.Tensor.pin_memory = pin
    patched.Tensor.is_pinned = lambda tensor, *_: (
        tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _PINNED
    )
