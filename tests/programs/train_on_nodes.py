"""train_tiny under torchrun, with a host name and a local folder below param `machines` for each rank. Usage: SPEC."""

import os
import socket
import sys
from pathlib import Path

import train_tiny  # type: ignore[import-not-found]  # in this folder
import yaml

if __name__ == "__main__":
    rank, path = os.environ["RANK"], Path(sys.argv[1])
    socket.gethostname = lambda: f"machine-{rank}"
    raw = yaml.safe_load(path.read_text())
    raw["checkpoint"]["local"] = f"{raw['params']['machines']}/{rank}"
    mine = path.with_suffix(f".{rank}.yaml")
    mine.write_text(yaml.safe_dump(raw))
    os.environ |= {"LOCAL_RANK": "0", "JOB_SPEC": str(mine)}
    train_tiny.main()
