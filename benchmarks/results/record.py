"""Keep a program's figures for the docs: `python -m benchmarks.results.record [--name RESULT] PROGRAM [ARGUMENT...]`.

It runs `python -m benchmarks.PROGRAM ARGUMENT...`, shows what it prints, and writes measured/RESULT.json: the figures of its
last line, with day, commit, machine and load. `python -m benchmarks.results.page` then makes docs/figures.md of all results.
A program that fails leaves the earlier result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.node import find_node

MEASURED = Path(__file__).with_name("measured")


def main() -> int:
    """Run the program, write its result, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--name", help="of the result, by default that of the program")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    about = {"program": asked.program, "arguments": asked.arguments, **_about()}
    load, begun = os.getloadavg()[0], time.monotonic()
    status, last = _run([sys.executable, "-m", f"benchmarks.{asked.program}", *asked.arguments])
    if status != 0:
        return status
    found = _figures_of(last, asked.program)
    about |= {"minutes": round((time.monotonic() - begun) / 60, 1), "load": [load, os.getloadavg()[0]]}
    (MEASURED / f"{asked.name or asked.program}.json").write_text(
        json.dumps({**about, "figures": found}, indent=1) + "\n"
    )
    return 0


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command, pass its output on, and return its exit status and its last line."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    return process.returncode, last


def _figures_of(line: str, program: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        figures: dict[str, Any] = found["figures"]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"expected the figures of {program} on its last line, found {line[:200]!r}") from None
    return figures


def _about() -> dict[str, Any]:
    """Return the day, the commit and the machine."""
    git = ["git", "-C", str(MEASURED), "describe", "--always", "--dirty", "--abbrev=7"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    node = find_node()
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = f"{node.system}, {gib:.0f} GiB, PyTorch {node.torch}"
    return {"day": time.strftime("%Y-%m-%d"), "commit": commit, "machine": machine}


if __name__ == "__main__":
    sys.exit(main())
