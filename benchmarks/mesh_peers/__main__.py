"""Loaders of trainers on meshes, at changes of a run: `python -m benchmarks.mesh_peers [--quick]`.

Four data-parallel ranks read the first third of 480 rows. Then nothing changes, the ranks become two, 160 rows are appended, or
the weights of two sources become 3 to 1, and the next launch reads on. Rows that were known before the change are counted.
Batches of ranks have 4 samples, and steps 16. Each loader is used as its documentation says, in its own environment, which is
made on the first run. --quick takes the loaders that need no other environment.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, report
from benchmarks.mesh_peers.cases import CASES, Outcome
from benchmarks.peer_loaders.environments import MEGATRON, OWN, TORCHTITAN, environment_of, python_of
from dlac_pipeline.extensions.loader_check.client import LoaderFailed

_LOADERS = {"dlac": OWN, "torchtitan": TORCHTITAN, "megatron": MEGATRON, "energon": MEGATRON}
_LIMIT_S = 600.0


def main() -> None:
    """Try all loaders, show and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    names = [name for name, environment in _LOADERS.items() if not quick or environment == OWN]
    with tempfile.TemporaryDirectory(prefix="dlac-mesh-peers-") as scratch:
        outcomes = {name: try_loader(name, Path(scratch)) for name in names}
    table = Table("repeated / missing rows", *outcomes)
    for case in CASES:
        table.add_row(case.name, *(_cell(found[case.name]) for found in outcomes.values()))
    Console(width=200).print(table)
    report("mesh_peers", figures(outcomes))


def try_loader(name: str, scratch: Path) -> dict[str, Outcome]:
    """Return the outcomes of a loader. Raise `LoaderFailed` with its last line if it ends early."""
    folder = scratch / name
    folder.mkdir()
    command = [str(python_of(_LOADERS[name])), "-m", f"{__package__}.cases", name, str(folder)]
    done = subprocess.run(
        command, env=environment_of(folder), capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        raise LoaderFailed(f"{name} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(json.dumps({name: lines}), flush=True)
    return {line.pop("case"): Outcome(**line) for line in lines}


def figures(outcomes: dict[str, dict[str, Outcome]]) -> dict[str, Figure]:
    """Return the rows of each loader and case, or that it refuses. DLAC may neither repeat nor miss one."""
    found: dict[str, Figure] = {}
    for name, cases in outcomes.items():
        bar = "<= 0" if name == "dlac" else None
        for case, outcome in cases.items():
            if outcome.refused:
                found[f"{name}.{case}.refused"] = Figure(value=1, unit="of 1")
                continue
            found[f"{name}.{case}.repeated"] = Figure(value=outcome.repeated, unit="rows", bar=bar)
            found[f"{name}.{case}.missing"] = Figure(value=outcome.missing, unit="rows", bar=bar)
    return found


def _cell(outcome: Outcome) -> str:
    return f"refused: {outcome.refused}" if outcome.refused else f"{outcome.repeated} / {outcome.missing}"


if __name__ == "__main__":
    main()
