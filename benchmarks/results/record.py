"""Keep a program's figures for the docs: `python -m benchmarks.results.record [--name RESULT] PROGRAM [ARGUMENT...]`.

It runs `python -m benchmarks.PROGRAM ARGUMENT...`, shows what it prints, and writes measured/RESULT.json: the figures of its
last line, with day, commit, machine and load. `python -m benchmarks.results.page` then makes docs/evidence/figures.md of all
results. A program that prints no figures leaves the earlier result. The exit status is that of the program: a missed bar
may be 1.
"""

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
    """Run the program, keep its result, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--name", help="of the result, by default that of the program")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if "--quick" in asked.arguments:
        parser.error("expected a full run, found --quick: a short run is not kept")
    command = [sys.executable, "-m", f"benchmarks.{asked.program}", *asked.arguments]
    return record(command, MEASURED / f"{asked.name or asked.program}.json", program=asked.program)


def record(command: list[str], file: Path, *, program: str) -> int:
    """Run a command, keep the figures of its last line in a file, and return its exit status."""
    about = {"program": program, "arguments": command[3:], **about_here()}
    load, begun = os.getloadavg()[0], time.monotonic()
    status, last = _run(command)
    about |= {"minutes": round((time.monotonic() - begun) / 60, 1), "load": [load, os.getloadavg()[0]]}
    about["figures"] = _figures_of(last, program, status)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(about, indent=1) + "\n")
    part.rename(file)
    return status


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command, pass its output on, and return its exit status and its last line."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    return process.returncode, last


def _figures_of(line: str, program: str, status: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
        figures: dict[str, Any] = found["figures"]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(
            f"expected the figures of {program} on its last line, found {line[:200]!r} and exit status {status}: the earlier "
            "result is kept"
        ) from None
    return figures


def about_here() -> dict[str, Any]:
    """Return the day, the commit and the machine."""
    git = ["git", "-C", str(MEASURED.parents[2])]
    commit = _output([*git, "rev-parse", "--short=7", "HEAD"])
    changed = _output([*git, "status", "--porcelain", "--", "dlac_pipeline", "benchmarks", ":!benchmarks/results"])
    node = find_node()
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = f"{node.system}, {gib:.0f} GiB, PyTorch {node.torch}"
    return {"day": time.strftime("%Y-%m-%d"), "commit": f"{commit}, changed" if changed else commit, "machine": machine}


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
