"""Peak resident memory of one reader, for benchmarks/reader.py. Input: home, kind, shuffle, rows of a row group. Output: JSON."""

import json
import sys
from pathlib import Path

import torch

from benchmarks.reader import job, kinds, open_reader
from dlac_pipeline.lakehouse.iceberg.connect import connect


def main() -> None:
    """Read a pass and a half. The kernel resets the peak on request."""
    home, name, shuffle, group_rows = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", int(sys.argv[4])
    kind = next(
        kind
        for quick in (False, True)
        for kind in kinds(quick=quick)
        if (kind.name, kind.group_rows) == (name, group_rows)
    )
    connect(job(home, kind, shuffle=shuffle).lakehouse)  # libraries' first use does not count
    torch.zeros(1)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    reader = open_reader(home, kind, shuffle=shuffle)
    rows, wanted = 0, 3 * kind.groups * kind.group_rows // 2
    for batch in reader:
        # A batch of text has parts of documents, which its advances count.
        moved = sum(advance.rows_consumed for _, _, advance in batch.moved)
        rows += moved if name == "text" else batch.rows
        if rows >= wanted:
            break
    print(json.dumps({"peak_bytes": _status("VmHWM") - before, "before_bytes": before}))
    reader.close()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
