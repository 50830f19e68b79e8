"""Watch of tensors that nothing is to change while another thread copies them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Key = tuple[int, int]
"""Address and bytes of a storage."""
_PAGE_BYTES = 4096
_LEAST_FROZEN_BYTES = 1 << 20
"""Fewer bytes are not worth a file of their own."""


class Watch:
    """Versions of tensors, and a number of each page of their storages: a write to `parameter.data` makes no version."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, list[tuple[str, torch.Tensor, int]]] = defaultdict(list)
        """Address -> tensors in this storage with their names and versions."""
        self._numbers: defaultdict[int, dict[int, tuple[str, torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        """Address -> bytes -> name of a tensor in this storage, and the numbers in the storage and as they were."""
        self.changed = ""
        """Name of the first tensor that was found changed."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Watch a plain tensor."""
        address, size = storage_key(tensor)
        self._seen[address].append((name, tensor, tensor._version))
        if size not in self._numbers[address]:
            dtype = torch.uint8 if address % 4 or size % 4 else torch.int32  # NaN is equal to itself then
            numbers = whole(tensor.untyped_storage(), dtype)[:: _PAGE_BYTES // dtype.itemsize]
            self._numbers[address][size] = name, numbers, numbers.clone()

    def compare(self, *addresses: int, content: bool = True) -> None:
        """Compare the tensors in storages, by default in all, with their former versions and `content`."""
        for address in addresses or self._seen:
            changed = [name for name, tensor, version in self._seen.get(address, ()) if tensor._version != version]
            pages = self._numbers.get(address, {}).values() if content else ()
            changed += [name for name, numbers, former in pages if not torch.equal(numbers, former)]
            self.changed = next(filter(None, (self.changed, *changed)), "")


def whole(storage: torch.UntypedStorage, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return a storage as a tensor."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def storage_key(tensor: torch.Tensor) -> Key:
    """Return the address and the bytes of a tensor's storage, zeros for other kinds of tensors."""
    if not is_plain(tensor):
        return 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def frozen_storages(modules: Iterable[object]) -> set[Key]:
    """Return the storages of parameters without a gradient, if they are large. Such a base of an adapter seldom changes."""
    found: dict[bool, set[Key]] = {False: set(), True: {(0, 0)}}
    for module in modules:
        for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
            found[parameter.requires_grad] |= {storage_key(each) for each in plain_tensors([parameter])}
    frozen = found[False] - found[True]
    return frozen if sum(size for _, size in frozen) >= _LEAST_FROZEN_BYTES else set()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is numbers in a storage."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a value. A tensor may consist of others, such as a DTensor."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from plain_tensors(each)
    elif isinstance(value, torch.Tensor) and is_plain(value):
        yield value
    elif isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        yield from plain_tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
