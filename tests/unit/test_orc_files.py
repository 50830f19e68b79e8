"""ORC files whose columns are read in part."""

from __future__ import annotations

import datetime as dt
import io

import pyarrow as pa
from pyarrow import orc

from dlac_pipeline.lakehouse.files.open_file import open_file


def test_unread_timestamps_may_be_any() -> None:
    """A file of several stripes opens with a timestamp before 1678, and its other columns are read."""
    early = pa.array([dt.datetime(1, 1, 1)] * 6, pa.timestamp("us"))
    rows, sink = pa.table({"at": early, "name": list("abcdef")}), io.BytesIO()
    with orc.ORCWriter(sink, stripe_size=1, batch_size=2) as writer:
        for start in range(0, 6, 2):
            writer.write(rows.slice(start, 2))
    opened = open_file("f.orc", pa.BufferReader(sink.getvalue()), ())
    assert list(opened.footer.rows) == [2, 2, 2]
    assert opened.read_all(["name"])["name"].to_pylist() == list("abcdef")


def test_equal_values_have_their_width() -> None:
    """A stripe of equal numbers, which takes a few bytes in the file, counts as large as it is in memory."""
    sink = io.BytesIO()
    orc.write_table(pa.table({"n": pa.array([7] * 10_000, pa.int64())}), sink, compression="zstd")
    opened = open_file("f.orc", pa.BufferReader(sink.getvalue()), ())
    assert len(sink.getvalue()) < 1_000
    assert opened.footer.bytes_of(0) == 80_000
