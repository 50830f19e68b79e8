"""Processes of benchmarks: kept results, and `benchmarks.gpu` on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import Side, compare
from benchmarks.gpu import PARTS
from benchmarks.gpu_parts.page import page_of
from benchmarks.results.record import record


@pytest.mark.slow
def test_result_is_kept_if_program_prints_figures(tmp_path: Path) -> None:
    """A missed bar is kept. A program that prints no figures leaves the earlier result."""
    file = tmp_path / "one.json"
    figures = {"median_s": {"value": 3, "unit": "s", "bar": "<= 1", "holds": False}}
    program = f"print({json.dumps(json.dumps({'benchmark': 'one', 'figures': figures}))}); raise SystemExit(1)"
    assert record([sys.executable, "-c", program], file, program="one") == 1
    kept = json.loads(file.read_text())
    assert (kept["program"], kept["figures"]) == ("one", figures)
    assert {"day", "commit", "machine", "load", "minutes"} <= kept.keys()
    with pytest.raises(SystemExit, match="expected the figures of one on its last line, found '' and exit status 2"):
        record([sys.executable, "-c", "raise SystemExit(2)"], file, program="one")
    assert json.loads(file.read_text()) == kept


def test_lost_bar_is_found(tmp_path: Path) -> None:
    """A bar that one commit meets and the other misses is lost, and a program that only one has is left out."""
    here, other = (Side(name=name, tree=tmp_path / name, python=Path(sys.executable)) for name in ("here", "other"))
    for side, value in ((here, 3.0), (other, 2.0)):
        figures = {
            name: {"value": value, "unit": "s", "bar": bar} for name, bar in (("fast", "<= 2.5"), ("kept", None))
        }
        (side.tree / "benchmarks").mkdir(parents=True)
        (side.tree / "benchmarks" / "__init__.py").touch()
        (side.tree / "benchmarks" / "sleep.py").write_text(f"print('{json.dumps({'figures': figures})}')")
    (here.tree / "benchmarks" / "new.py").touch()
    found, lost = compare(here, other, "sleep --long", 2)
    assert {name: figure.value for name, figure in found.items()} == {"sleep.fast": 1.5, "sleep.kept": 1.5}
    assert lost == ["sleep.fast"]
    assert not compare(other, here, "sleep", 1)[1]
    assert compare(here, other, "new", 1) == ({}, [])


@pytest.mark.soak
def test_all_parts_run_on_cpu(tmp_path: Path) -> None:
    """Every part runs, the killed demo recovers with the same losses, and the page has all of them."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kept = json.loads(out.read_text())
    assert not kept["failed"]
    if kept["machine"]["device"] == "cpu":
        took = {name for name in kept["figures"] if name.endswith("_took_s")}
        assert took == {f"{part}_took_s" for part in PARTS if part != "demo-default"}
    assert kept["figures"]["demo_recoveries_deterministic"]["value"] >= 1
    assert "?" not in page_of(kept)
