"""Real text as rows of bytes: the modules of Python's standard library, some of which are held back for validation."""

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""[rows, tokens], one byte of text as a token."""
VOCABULARY = 256
_HELD_BACK = 8
"""One module of this many is for validation."""


def training_rows(rows: int, length: int) -> Tokens:
    """Return that many rows of text in the order of the modules, which drifts: tests come last, then the large packages."""
    return _rows(rows, length, held_back=False)


def validation_rows(rows: int, length: int) -> Tokens:
    """Return that many rows of the modules that no training row is of."""
    return _rows(rows, length, held_back=True)


def _rows(rows: int, length: int, *, held_back: bool) -> Tokens:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [path for number, path in enumerate(modules) if (number % _HELD_BACK == 0) == held_back]
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in chosen), np.uint8)
    starts = np.linspace(0, len(text) - length, rows).astype(np.int64)
    if rows * length > len(text):
        raise ValueError(f"expected {rows * length} bytes of text, found {len(text)}: ask for fewer rows")
    found: Tokens = text[starts[:, None] + np.arange(length)].astype(np.int32)
    return found
