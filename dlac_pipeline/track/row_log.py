"""Logs of consumed rows: one record per optimizer step of a rank. Other environments import this: standard library and numpy."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


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
    """Return all whole records of a log, without a torn last one."""
    values = np.frombuffer(log[: len(log) // 8 * 8], dtype=np.int64)
    records, at = [], 0
    while at + 3 <= len(values) and at + 3 + values[at + 2] <= len(values):
        pass_number, step, count = (int(value) for value in values[at : at + 3])
        records.append(Record(pass_number, step, values[at + 3 : at + 3 + count]))
        at += 3 + count
    return records
