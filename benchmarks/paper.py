"""The paper's experiments, ours beside theirs and the peers': `python -m benchmarks.paper [--quick] [--only PART,...]`.

`divergence` trains one model with several loaders under the same faults. The other parts are programs of this folder, most of
them in their short form. The folder of `--out` gets one page with every experiment as HTML and as PDF, and `paper.json`, which
keeps the parts of earlier calls. `--docs FILE` only makes docs/evidence/paper.md and its pictures of one.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.paper_parts import divergence, page
from benchmarks.paper_parts.divergence import FULL, QUICK, Outcome
from benchmarks.paper_parts.model import new_model
from benchmarks.paper_parts.month import figures_of_month
from benchmarks.paper_parts.programs import PROGRAMS, measure_program
from benchmarks.paper_parts.summary import summarize
from benchmarks.results.record import about_here

_DOCS = Path(__file__).parents[1] / "docs" / "evidence"
_QUICK_PARTS = ("divergence", "checkpoint", "coordination", "state")


def main() -> int:
    """Measure, write the page, and report. Return 1 if a part failed, or DLAC trained otherwise than undisturbed."""
    parts = ("divergence", *PROGRAMS)
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one seed, one setting, ten faults, and three programs")
    parser.add_argument("--only", help=f"some of {','.join(parts)}")
    parser.add_argument(
        "--out", type=Path, default=Path("paper"), help="folder of paper.html, paper.pdf and paper.json"
    )
    parser.add_argument("--docs", type=Path, help="JSON file of a measurement, of which docs/evidence/paper.md is made")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and files are cleaned up
    if asked.docs:
        page.write_docs(json.loads(asked.docs.read_text()), _DOCS)
        return 0
    names = asked.only.split(",") if asked.only else _QUICK_PARTS if asked.quick else parts
    if unknown := set(names) - set(parts):
        parser.error(f"expected some of {','.join(parts)}, found {','.join(sorted(unknown))}")
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "paper.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    place = about_here()
    for name in names:
        begun, load = time.monotonic(), os.getloadavg()[0]
        measured = _divergence(quick=asked.quick) if name == "divergence" else measure_program(name)
        about = {**place, "seconds": time.monotonic() - begun, "quick": asked.quick and name == "divergence"}
        found[name] = {**measured, **about, "load": [load, os.getloadavg()[0]]}
        file.write_text(json.dumps(found))
        page.write_page(found, asked.out)
    figures = {**figures_of(found), **figures_of_month(found)}
    report("paper", figures, page=str(asked.out / "paper.html"))
    failed = [name for name in names if "failed" in found[name]]
    return int(bool(failed) or not all(figure.holds for figure in figures.values()))


def _divergence(*, quick: bool) -> dict[str, Any]:
    effort = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="dlac-paper-", ignore_cleanup_errors=True) as scratch:
        try:
            outcomes = divergence.measure(effort, Path(scratch))
        except Exception as err:  # the other parts are measured all the same
            return {"failed": f"{type(err).__name__}: {err}"}
    parameters = sum(each.numel() for each in new_model(0)[0].parameters())
    return {"effort": {**asdict(effort), "parameters": parameters}, "outcomes": [asdict(each) for each in outcomes]}


def figures_of(found: dict[str, Any]) -> dict[str, Figure]:
    """Return the figures of the divergence: of each setting and method, what it cost and what it read wrongly."""
    if "outcomes" not in found.get("divergence", {}):
        return {}
    outcomes = [Outcome.from_json(each) for each in found["divergence"]["outcomes"]]
    figures: dict[str, Figure] = {}
    for each in filter(lambda each: each.seeds, summarize(outcomes, divergence.BATCH)):
        ours = each.method.startswith("dlac")
        name = f"{each.setting}_{each.method}"
        figures |= {
            f"{name}_excess_loss": Figure(value=each.excess, unit="nats", bar="<= 0" if ours else None),
            f"{name}_identical": Figure(value=each.identical, unit="seeds", bar=f">= {each.seeds}" if ours else None),
            f"{name}_repeated": Figure(value=each.repeated, unit="rows", bar="<= 0" if ours else None),
            f"{name}_missing": Figure(value=each.missing, unit="rows", bar="<= 0" if ours else None),
        }
    inexact = sum(each.exact is False for each in outcomes)
    failed = sum(bool(each.failed) for each in outcomes if each.method.startswith("dlac"))
    return {
        **figures,
        "audits_not_exact": Figure(value=inexact, unit="runs", bar="<= 0"),
        "dlac_trainings_failed": Figure(value=failed, unit="trainings", bar="<= 0"),
    }


if __name__ == "__main__":
    sys.exit(main())
