"""Transform: a user's own Arrow function between decoding and samples. Live rows in, rows and their origins out.

    def f(batch: pa.RecordBatch) -> pa.RecordBatch

Several background threads may call it at the same time. docs/reading.md has its contract.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from blake3 import blake3

from dlac_pipeline.lakehouse.errors import TransformFailed
from dlac_pipeline.rows.columns import Ints

ROW = "dlac_row"
Reject = Literal["fail", "quarantine"]
"""Policy for rows at which the function raises: an error, or they are skipped and named."""
Rejected = tuple[tuple[int, str], ...]
"""(position, reason) of each row passed over, by position."""


class RowRejected(TransformFailed):
    """The function raised for one row. `position` is its position in the block, for the caller to name file and row."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class Transform:
    """A user's function, and its facts that a leg binds."""

    name: str
    """Name in the spec: path/to/file.py:function or package.module:function."""
    digest: str
    """Digest of the bytes of the function's source file and its name. Imports of that file are not in it."""
    function: Callable[[pa.RecordBatch], Any]


@dataclass(frozen=True, slots=True)
class Transformed:
    """The fate of rows."""

    table: pa.Table
    """Output rows, without `dlac_row`. No columns if every row was rejected."""
    row: Ints
    """Input row of each output row, int64 [output rows], non-decreasing."""
    rejected: Rejected = ()


def load_transform(name: str) -> Transform:
    """The function named "path/to/file.py:function" or "package.module:function". Raises `TransformFailed` without one."""
    origin, colon, attribute = name.rpartition(":")
    if not colon or not origin or not attribute:
        raise TransformFailed(
            f'expected a transform as "path/to/file.py:function" or "package.module:function", found {name!r}'
        )
    module, source = _from_file(Path(origin)) if origin.endswith(".py") else (_imported(origin), None)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise TransformFailed(f"expected a function {attribute!r} in {origin!r}, found {function!r}: correct {name!r}")
    source = _source(function, module) if source is None else source
    return Transform(name, blake3(source + b"\0" + attribute.encode()).hexdigest(), function)


def _from_file(path: Path) -> tuple[ModuleType, bytes]:
    try:
        source = path.read_bytes()
    except OSError as err:
        raise TransformFailed(
            f"expected the transform's file at {str(path.absolute())!r}, found {err}: correct the path"
        ) from err
    module = ModuleType(f"dlac_transform_{blake3(source).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look modules up by name
    try:
        # These bytes, not those of a stale .pyc: the digest is that of the code that runs.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as err:
        raise _import_failed(str(path), err) from err
    return module, source


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as err:
        raise _import_failed(name, err) from err


def _import_failed(origin: str, err: BaseException) -> TransformFailed:
    return TransformFailed(f"expected {origin!r} to be imported, found {type(err).__name__}: {err}; correct it")


def _source(function: Callable[..., Any], module: ModuleType) -> bytes:
    """The file that defines the function, which may be another one than the module it was asked from."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        path = getattr(module, "__file__", None)
    try:
        return Path(path or "").read_bytes()
    except OSError as err:
        raise TransformFailed(
            f"expected the source file of {function!r}, found none: a leg binds a transform by the digest of its source, "
            "write the function in a Python file"
        ) from err


def transform_rows(
    transform: Transform, live: pa.Table, positions: Ints, *, reject: Reject = "fail", check: bool = False
) -> Transformed:
    """Run the function over rows at these positions [rows]. With `check`, also over halves, which must give the same.

    Raises:
        RowRejected: the function raised for a row and `reject` is "fail".
        TransformFailed: the function's result breaks its contract, or depends on how rows were batched.
    """
    call = _Call(transform, positions, reject)
    parts: list[Transformed] = []
    start = 0
    for batch in live.combine_chunks().to_batches():
        whole = call.run(batch, start)
        if check and len(batch) > 1:
            call.compare(whole, _halves(batch, start, call.run))
        parts.append(whole)
        start += len(batch)
    return call.joined(parts)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function over the rows of one block. `start` is the first row of a batch within the block."""

    transform: Transform
    positions: Ints
    reject: Reject

    def run(self, batch: pa.RecordBatch, start: int) -> Transformed:
        """The output of a batch, rejected rows found by bisection and left out."""
        numbers = pa.array(np.arange(len(batch), dtype=np.int64))
        try:
            output = self.transform.function(batch.append_column(ROW, numbers))
        except MemoryError:
            raise  # not the fault of a row
        except Exception as err:
            return self._bisected(batch, start, err)
        table, row = self._checked(output, len(batch))
        return Transformed(table, row + start)

    def _bisected(self, batch: pa.RecordBatch, start: int, err: Exception) -> Transformed:
        reason = f"{type(err).__name__}: {err}"
        if len(batch) == 1:
            position = int(self.positions[start])
            if self.reject == "quarantine":
                return Transformed(pa.table({}), np.zeros(0, dtype=np.int64), ((position, reason),))
            raise RowRejected(
                position,
                f"expected transform {self.transform.name!r} to take every row, found that it raises {reason} for the row at "
                f'position {position}: correct it, drop such rows in it, or choose on_reject = "quarantine"',
            ) from err
        part = self.joined(_halves(batch, start, self.run))
        if not part.rejected:
            raise self._failed(
                "to depend on each row alone", f"{reason} for {len(batch)} rows together and for no part of them"
            ) from err
        return part

    def _checked(self, output: Any, rows: int) -> tuple[pa.Table, Ints]:
        if isinstance(output, pa.RecordBatch):
            output = pa.Table.from_batches([output])
        if not isinstance(output, pa.Table):
            raise self._failed("to return a pyarrow.RecordBatch", repr(type(output)))
        if ROW not in output.column_names:
            if output.num_rows != rows:
                raise self._failed(f"to return {rows} rows for {rows}, or their {ROW!r}", f"{output.num_rows} rows")
            return output, np.arange(rows, dtype=np.int64)
        column = output[ROW]
        if not pa.types.is_integer(column.type) or column.null_count:
            raise self._failed(f"to return {ROW!r} as integers", f"{column.type} with {column.null_count} nulls")
        row = column.to_numpy().astype(np.int64)
        if len(row) and (row[0] < 0 or row[-1] >= rows or (np.diff(row) < 0).any()):
            order = f"to return {ROW!r} in non-decreasing order within 0..{rows - 1}"
            raise self._failed(order, repr(row[:20].tolist()))
        return output.drop_columns([ROW]), row

    def joined(self, parts: list[Transformed]) -> Transformed:
        rejected = tuple(each for part in parts for each in part.rejected)
        tables = [part.table for part in parts if part.table.num_columns]
        if not tables:
            return Transformed(pa.table({}), np.zeros(0, dtype=np.int64), rejected)
        try:
            table = pa.concat_tables(tables)
        except pa.ArrowInvalid as err:
            raise self._failed("to return the same columns from every call", str(err)) from err
        return Transformed(table, np.concatenate([part.row for part in parts]), rejected)

    def compare(self, whole: Transformed, halves: list[Transformed]) -> None:
        again = self.joined(halves)
        same_rows = np.array_equal(whole.row, again.row) and whole.rejected == again.rejected
        if same_rows and _same(whole.table, again.table):
            return
        raise self._failed("to depend on each row alone", "other results for two halves of a batch than for the whole")

    def _failed(self, expected: str, found: str) -> TransformFailed:
        return TransformFailed(f"expected transform {self.transform.name!r} {expected}, found {found}: correct it")


def _halves(batch: pa.RecordBatch, start: int, run: Callable[[pa.RecordBatch, int], Transformed]) -> list[Transformed]:
    middle = len(batch) // 2
    return [run(batch.slice(0, middle), start), run(batch.slice(middle), start + middle)]


def _same(one: pa.Table, other: pa.Table) -> bool:
    """Equal, NaN being equal to NaN, which Arrow's comparison is not."""
    return bool(one.equals(other)) or repr(one.to_pydict()) == repr(other.to_pydict())
