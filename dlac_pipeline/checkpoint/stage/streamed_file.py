"""Streamed file: a state is written once, front to back, and digested on the way. See docs/design/0003-checkpoints.md."""

import errno
import fcntl
import json
import mmap
import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch.utils.serialization import config as torch_config

_BUFFER_BYTES = 8 << 20
"""A multiple of every device's block size. The rest at the end, and so a small file, passes through the page cache."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)
DTYPES = {
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.uint8: "U8",
}
"""Types of elements that a safetensors file can have, as its header names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A file's content, as it was handed to the operating system."""

    bytes: int
    digest: str
    """BLAKE3, as hex."""
    digest_s: float


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that another program has written, as a state. Its bytes are the content."""

    path: Path


@dataclass(frozen=True, slots=True)
class Frozen:
    """The state of a file that seldom changes. A checkpoint refers to the file of the last one while their contents are equal."""

    state: Any


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a safetensors file, as a state. Its tensors are strided."""

    tensors: dict[str, torch.Tensor]
    about: dict[str, str]
    """Texts in its header."""


def write_state(state: Any, path: Path | None, *, direct: bool = True) -> Written:
    """Write a state into a new file, which is not durable yet: a `TensorFile` as safetensors, any other by `torch.save`.

    Without a path it is digested only. A `WrittenFile` is copied, or digested in its place. `direct`: past the page cache, for
    files not read again soon. The zip's own checksums are left out: torch never checks them, and the digest is stronger. Raise
    `OSError` if the file cannot be written, or exists already.
    """
    in_place = isinstance(state, WrittenFile) and state.path == path
    with closing(_StreamedFile(None if in_place else path, direct=direct)) as file:
        write_content(state, file)
        return file.finish()


class Target(Protocol):
    """Target to which a state's content is written."""

    def write(self, data: memoryview, /) -> int:
        """Take `data`, which may change afterwards, and return its length."""

    def flush(self) -> None:
        """Nothing: the end of the content does it."""


def write_content(state: Any, file: Target) -> None:
    """Write a state's content, front to back."""
    if isinstance(state, Frozen):
        state = state.state
    if isinstance(state, WrittenFile):
        with state.path.open("rb") as stream:
            while content := stream.read(_BUFFER_BYTES):
                file.write(memoryview(content))
    elif isinstance(state, TensorFile):
        _write_tensors(state, file)
    else:
        with torch_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # made at import
            torch.save(state, file)  # type: ignore[arg-type]  # it asks for write and flush only


def _write_tensors(state: TensorFile, file: Target) -> None:
    """Write the length of a JSON object, padded to 8 bytes, the object, and tensors.

    The library's own functions need the whole file in memory, or write it past the digest.
    """
    # Elements of the largest size come first, so that all are aligned. The same state makes the same bytes.
    tensors = sorted(state.tensors.items(), key=lambda entry: (-entry[1].element_size(), entry[0]))
    header: dict[str, Any] = {"__metadata__": state.about}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    content = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    content = content.ljust(-len(content) // 8 * -8)
    file.write(memoryview(len(content).to_bytes(8, "little") + content))
    for _, tensor in tensors:
        if tensor.numel():
            plain: Any = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            file.write(memoryview(plain.view(-1).view(torch.uint8).numpy()))


class _StreamedFile:
    """Target of `torch.save`. A failure is kept until `finish`: if it were raised earlier, torch would report another error."""

    def __init__(self, path: Path | None, *, direct: bool) -> None:
        """Open a new file. Without a path the content is digested only."""
        self._descriptor = os.open(os.devnull, os.O_WRONLY) if path is None else _open_new(path, direct)
        self._memory = mmap.mmap(-1, _BUFFER_BYTES)  # its address is a multiple of the page size, as O_DIRECT asks
        self._buffer = np.frombuffer(self._memory, np.uint8)
        self._filled = 0
        self._bytes = 0
        self._digest_s = 0.0
        self._hasher = blake3()
        self._failure: OSError | None = None

    def write(self, data: memoryview) -> int:
        """Take `data`, which may change afterwards."""
        rest = np.frombuffer(data, np.uint8)
        self._bytes += len(rest)
        while len(rest) and self._failure is None:
            part = rest[: _BUFFER_BYTES - self._filled]
            np.copyto(self._buffer[self._filled : self._filled + len(part)], part)  # releases the GIL
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _BUFFER_BYTES:
                self._hand_over()
        return len(data)

    def flush(self) -> None:
        """Nothing: `finish` does it."""

    def finish(self) -> Written:
        """Hand over the rest. Raise `OSError` if something could not be written."""
        if self._failure is None:
            _through_the_cache(self._descriptor)
            self._hand_over()
        if self._failure is not None:
            raise self._failure
        return Written(bytes=self._bytes, digest=self._hasher.hexdigest(), digest_s=self._digest_s)

    def close(self) -> None:
        os.close(self._descriptor)

    def _hand_over(self) -> None:
        part = memoryview(self._memory)[: self._filled]
        started = time.monotonic()
        self._hasher.update(part)
        self._digest_s += time.monotonic() - started
        try:
            while len(part):
                part = part[_write(self._descriptor, part) :]
        except OSError as err:
            self._failure = err
        self._filled = 0


def _open_new(path: Path, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | (_DIRECT if direct else 0), 0o666)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)  # a file system without O_DIRECT


def _write(descriptor: int, part: memoryview) -> int:
    try:
        return os.write(descriptor, part)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        _through_the_cache(descriptor)  # a device with larger blocks, or a short write before this one
        return os.write(descriptor, part)


def _through_the_cache(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)
