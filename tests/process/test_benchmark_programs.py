"""Processes of benchmarks: programs with a time limit, kept results, and a store that is filled up."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_parts.node import run_program
from benchmarks.results.record import record


def test_program_without_end_is_killed(tmp_path: Path) -> None:
    """So are its children. A program that prints nothing has failed."""
    file = tmp_path / "child"
    child = f"import pathlib, time; time.sleep(2); pathlib.Path({str(file)!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(RuntimeError, match="to end within 1 s, found it running"):
        run_program([sys.executable, "-c", program], limit_s=1.0)
    time.sleep(2)
    assert not file.exists()
    with pytest.raises(RuntimeError, match="to print its figures and end with status 0, found 0"):
        run_program([sys.executable, "-c", ""])


def test_result_is_kept_if_program_prints_figures(tmp_path: Path) -> None:
    """A missed bar is kept. A program that prints no figures leaves the earlier result."""
    file = tmp_path / "one.json"
    figures = {"median_s": {"value": 3, "unit": "s", "bar": "<= 1", "holds": False}}
    program = f"print({json.dumps(json.dumps({'benchmark': 'one', 'figures': figures}))}); raise SystemExit(1)"
    command = [sys.executable, "-c", program]
    assert record(command, file, program="one") == 1
    kept = json.loads(file.read_text())
    assert (kept["program"], kept["figures"]) == ("one", figures)
    assert {"day", "commit", "machine", "load", "minutes"} <= kept.keys()
    with pytest.raises(SystemExit, match="expected the figures of one on its last line, found '' and exit status 2"):
        record([sys.executable, "-c", "raise SystemExit(2)"], file, program="one")
    assert json.loads(file.read_text()) == kept
