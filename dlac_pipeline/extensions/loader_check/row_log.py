"""Logs of consumed rows: a record per optimizer step of a rank, and `Shadow`, which a foreign training loop writes.

    from dlac_pipeline.extensions.loader_check import Shadow

    shadow = Shadow("shadow", step=restored_step)   # 0 where the training begins
    for batch in their_loader:
        ...                                              # forward, backward, optimizer step
        shadow.step(batch["row_id"])
    shadow.close()                                       # only at the end of the training

Each rank of each launch writes another file. The loop never waits for another process, and no error reaches it.
`dlac shadow` compares the rows with DLAC's order. Other environments import this module: standard library and numpy only.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

SHADOW_VERSION = 1
"""Version of the files. A later DLAC reads files of an earlier one."""
SUFFIX = ".rows"
END = -1
"""Pass number of the record that ends a training."""


class Record(NamedTuple):
    """The rows of one optimizer step."""

    pass_number: int
    step: int
    ids: Ids


def record_bytes(record: Record) -> bytes:
    """Return a record as bytes of a log."""
    head = np.array([record.pass_number, record.step, len(record.ids)], dtype=np.int64)
    return head.tobytes() + np.ascontiguousarray(record.ids, dtype=np.int64).tobytes()


def read_records(log: bytes) -> list[Record]:
    """Return all whole records of a log, without a torn last one, and without zeros that a crash of the node has left."""
    values = np.frombuffer(log[: len(log) // 8 * 8], dtype=np.int64)
    records: list[Record] = []
    at = last = 0
    while at + 3 <= len(values):
        pass_number, step, count = (int(value) for value in values[at : at + 3])
        if count < 0 or at + 3 + count > len(values) or step < last + (pass_number != END):
            break
        last = step
        records.append(Record(pass_number, step, values[at + 3 : at + 3 + count]))
        at += 3 + count
    return records


class Shadow:
    """A record of the rows that this rank trains on. The first problem is logged as a warning, and ends the record only."""

    def __init__(
        self, folder: str | Path, *, step: int, rank: int | None = None, world_size: int | None = None
    ) -> None:
        """`step` is the optimizer step of the checkpoint that the loop restored, 0 without one.

        Rank and world size default to torch.distributed's, else to RANK and WORLD_SIZE. The folder is shared by all ranks
        and launches of the training.
        """
        self._step = step
        self._file: int | None = None
        self._failed = False
        with self._warning():
            own_rank, own_world_size = _own_place()
            rank = int(own_rank if rank is None else rank)
            world_size = int(own_world_size if world_size is None else world_size)
            started_ns = time.time_ns()
            place = {"rank": rank, "world_size": world_size, "step": int(step), "started_ns": started_ns}
            head = json.dumps({"format_version": SHADOW_VERSION, **place}).encode() + b"\n"
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"rank-{rank:05d}-{started_ns}-{os.getpid()}{SUFFIX}"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._write(head)

    def step(self, row_ids: Any, *, pass_number: int = 0) -> None:
        """Record the rows of the optimizer step that this rank has just finished: integers, as an array, a tensor or a list."""
        if self._failed:
            return
        with self._warning():
            if pass_number < 0:
                raise ValueError(f"expected numbers of passes from 0, found {pass_number}")
            self._step += 1
            self._write(record_bytes(Record(pass_number, self._step, _as_ids(row_ids))))

    def close(self) -> None:
        """Record that the training has ended. Rows that it has not read are missing then. A restart does not call it."""
        if self._file is not None and not self._failed:
            with self._warning():
                self._write(record_bytes(Record(END, self._step, np.empty(0, np.int64))))
        self._release()

    def __enter__(self) -> "Shadow":
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def _write(self, data: bytes) -> None:
        if self._file is None:
            raise ValueError("it was closed")
        if os.write(self._file, data) != len(data):
            raise OSError("no space is left for its file")

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with self._warning():  # a shared folder may report a full disk only now
                os.close(file)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as err:
            self._failed = True
            logging.getLogger(__name__).warning(
                "Shadow records no more rows of this rank: %s: %s; training is not affected",
                type(err).__name__,
                err,
            )


def _own_place() -> tuple[int, int]:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _as_ids(row_ids: Any) -> Ids:
    if hasattr(row_ids, "detach"):
        row_ids = row_ids.detach().cpu()
    ids = np.asarray(row_ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"expected row ids as integers, found values of type {ids.dtype}")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
        raise ValueError(f"expected row ids below 2**63, found {ids.max()}")
    return ids.reshape(-1).astype(np.int64)
