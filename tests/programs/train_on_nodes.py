"""The tiny model under torchrun, as if every rank were on a separate node: with different host names and local folders."""

import os
import socket
import sys
from pathlib import Path

import yaml
from train_tiny import train  # type: ignore[import-not-found]  # in this folder

import dlac_pipeline as dlac


def main() -> None:
    """Train the spec named on the command line to its end, or until a step."""
    rank = os.environ["RANK"]
    socket.gethostname = lambda: f"machine-{rank}"
    os.environ["LOCAL_RANK"] = "0"
    raw = yaml.safe_load(Path(sys.argv[1]).read_text())
    raw["checkpoint"]["local"] = f"{raw['params']['machines']}/{rank}"
    mine = Path(sys.argv[1]).with_suffix(f".{rank}.yaml")
    mine.write_text(yaml.safe_dump(raw))
    with dlac.training_run(mine) as run:
        train(run)


if __name__ == "__main__":
    main()
