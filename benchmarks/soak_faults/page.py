"""The campaign as a page of the docs: from its JSON to Markdown."""

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.soak_faults.choosing import KINDS
from dlac_pipeline.extensions.chaos.facts import PHASES

Record = dict[str, Any]


def page_of(campaign: Record) -> str:
    """Return the page."""
    faults: list[Record] = campaign["faults"]
    runs: list[Record] = campaign["runs"]
    left = [f"{name}: {', '.join(found)}" for name, found in campaign["left"].items() if found]
    quarantined = sum(fault["summary"]["quarantined"] for fault in faults)
    skipped = ", ".join(campaign["skipped"])
    lines = [
        "# Self-healing soak",
        "",
        "`make soak-campaign` runs it and writes this page. [soak.json](soak.json) has each fault: kind, run, step, outcome, "
        "seconds and phases.",
        "",
        f"**{len(faults)} faults in {campaign['minutes_taken']:.0f} minutes**, seed {campaign['seed']}, on "
        f"{campaign['day']}, {campaign['machine']}.",
        "",
        "A real Dagster (daemon, code server, sensors) on an embedded lakehouse. Three training runs with checkpoints every 10 "
        "steps: two ranks with synchronous checkpoints, two ranks with asynchronous ones (both with states in memory), and three "
        "replica groups.",
        "",
        *([f"- **It failed:** {campaign['failed']}"] if campaign["failed"] else []),
        f"- Healed: {sum(fault['recovery_s'] is not None for fault in faults)} of {len(faults)} faults. {quarantined} damaged "
        "checkpoints were quarantined, and their parents resumed.",
        f"- Runs: {len(runs)}, with {sum(run['attempts'] for run in runs)} attempts. Finished: {_count(runs, 'finished')}. "
        f"Audit exact: {_count(runs, 'audit_exact')}. Journal equals ledger: {_count(runs, 'journal_agrees')}. Losses "
        f"bit-identical (replica groups: within 1e-5) to those of a run without faults: {_count(runs, 'losses_identical')}.",
        f"- Left over ({', '.join(campaign['left'])}): {'; '.join(left) or 'nothing'}.",
        *_launches(campaign["launch_folders"]),
        *([f"- Not in it: {skipped}."] if skipped else []),
        *(f"- {remark}" for remark in campaign.get("remarks", ())),
        "",
        "Seconds from the fault to the first new optimizer step of the last run that it struck:",
        "",
        *_table(("kind", "is", "faults", "median", "max"), _by_kind(faults)),
        "",
    ]
    return "\n".join(lines)


def faults_of(campaign: Record) -> str:
    """Return the faults of a campaign as JSON: a list with one object per line."""
    faults: list[Record] = campaign["faults"]
    followed = {fault["during"] for fault in faults}
    rows = (_fault_row(fault, followed=fault["number"] in followed) for fault in faults)
    objects = (json.dumps({name: str(cell) for name, cell in zip(_HEADS, row, strict=True)}) for row in rows)
    return "[\n" + ",\n".join(objects) + "\n]\n"


def _launches(folders: Record) -> list[str]:
    if not folders:
        return []
    return [
        f"- Launch folders, with each launch's logs; those of a run's newest 50 attempts are kept: {folders['all']}, of which "
        f"{folders['unclaimed']} are of launches that died before they had claimed their run."
    ]


_HEADS = (
    "no.",
    "kind",
    "run, step",
    "what was done",
    "noticed by",
    "outcome",
    "s",
    *(name.removesuffix("_s").replace("_", " ") for name in PHASES),
    "rows replayed",
)


def seconds_by_kind(faults: Sequence[Record]) -> dict[str, list[float]]:
    """Return kind -> seconds of each healed fault, with kinds in order."""
    found: dict[str, list[float]] = {}
    for kind in KINDS:
        seconds = [fault["recovery_s"] for fault in faults if fault["kind"] == kind and fault["recovery_s"] is not None]
        if seconds:
            found[kind] = seconds
    return found


def day_of(moment: float) -> str:
    """Return a moment's day."""
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


def _by_kind(faults: Sequence[Record]) -> Iterable[Sequence[object]]:
    for kind, seconds in seconds_by_kind(faults).items():
        yield kind, KINDS[kind].description, len(seconds), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"


def _fault_row(fault: Record, *, followed: bool) -> Sequence[object]:
    """Return the cells of one fault. If it was `followed` by another fault, it may have been noticed only with that one."""
    facts = fault["summary"]
    during = f" (recovering from {fault['during']})" if fault["during"] else ""
    runs = ", ".join(fault["runs"])
    outcome = "resumed" if facts["recoveries"] else "resumed after the next fault" if followed else "continued"
    if facts["quarantined"]:
        outcome = f"quarantined {facts['quarantined']}, parent resumed"
    if "failed again" in facts["outcomes"]:
        outcome += " after the next fault" if followed else " at the second try"
    return (
        fault["number"],
        fault["kind"] + during,
        f"{runs}, {fault['step']}",
        fault["what"],
        ", ".join(facts["noticed_by"]),
        outcome if fault["recovery_s"] is not None else "**not healed**",
        "" if fault["recovery_s"] is None else f"{fault['recovery_s']:.1f}",
        *(f"{facts[phase]:.1f}" if facts["recoveries"] else "" for phase in PHASES),
        facts["rows_replayed"] if facts["recoveries"] else "",
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(map(str, row)) + " |" for row in cells]


def _count(runs: Sequence[Record], name: str) -> str:
    held = sum(bool(run[name]) for run in runs)
    return "all" if runs and held == len(runs) else f"{held} of {len(runs)}"
