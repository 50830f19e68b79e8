"""Peak resident memory of one reader, for benchmarks/reader.py. Input: home, kind, shuffle, quick. Output: JSON."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch

from benchmarks.reader import job, kinds, open_reader
from dlac_pipeline.lakehouse.iceberg.connect import connect


def main() -> None:
    """Read a pass and a half. The kernel resets the peak on request."""
    home, name, shuffle, quick = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1"
    kind = next(kind for kind in kinds(quick=quick) if kind.name == name)
    connect(job(home, kind, shuffle=shuffle).lakehouse)  # libraries' first use does not count
    torch.zeros(1)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    reader = open_reader(home, kind, shuffle=shuffle)
    rows = kind.groups * kind.group_rows
    batches = 3 * rows // kind.batch_size // 2
    for _ in itertools.islice(reader, batches):
        pass
    print(json.dumps({"peak_bytes": _status("VmHWM") - before, "before_bytes": before}))
    reader.close()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
