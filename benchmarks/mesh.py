"""Runs that change their mesh: `python -m benchmarks.mesh [--quick]`.

Eight processes train a small GPT on four meshes, (dp, tp, pp, cp) = (8,1,1,1), (4,2,1,1), (2,2,2,1) and (2,1,2,2). For each
ordered pair a run begins on the first one, loses a random rank by SIGKILL, resumes there, saves, loses all processes, and trains
to its end on the second one. By turns it reads samples, packed documents, or documents of a mixture of two tables. An undisturbed
run on each mesh is the comparison. --quick takes two pairs.

Rows are counted by the audit, and by the log that the script writes itself: each step of the surviving lineage has the rows of
the undisturbed run on the first mesh. Losses are those of the ledger.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import yaml

from benchmarks.figures import Figure, report
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow

_PROGRAM = Path(__file__).parent / "programs" / "mesh_rank.py"
_RANKS, _LENGTH, _EVERY = 8, 32, 5
BATCH = 16
SAMPLES = 30 * BATCH
MESHES = {
    "8,1,1,1": {},
    "4,2,1,1": {"tp": 2},
    "2,2,2,1": {"tp": 2, "pp": 2},
    "2,1,2,2": {"pp": 2, "cp": 2},
}
KINDS = ("samples", "packed", "mixed")
_LIMIT_S = 600.0
Rows = list[list[int]]


def main() -> None:
    """Train on all pairs, compare, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    pairs = [*permutations(MESHES, 2)]
    pairs = [pairs[4], pairs[8]] if quick else pairs
    with tempfile.TemporaryDirectory(prefix="dlac-mesh-") as home:
        lab = Lab(Path(home))
        lab.make_tables()
        report("mesh", lab.compare(pairs) | {"load_average_1min": Figure(value=os.getloadavg()[0], unit="processes")})


@dataclass
class Lab:
    """The runs of one home folder."""

    home: Path

    @property
    def lakehouse(self) -> Lakehouse:
        """The lakehouse of the runs."""
        return connect(LakehouseConfig().at_home(self.home), create=True)

    def make_tables(self) -> None:
        """Write samples of one length, and two tables of documents. Each token is the number of its row."""
        chance = np.random.default_rng(5)
        lakehouse = self.lakehouse
        lakehouse.create_namespace("src")
        lengths = {
            "samples": np.full(SAMPLES, _LENGTH),
            **{name: chance.integers(4, 60, 400) for name in ("one", "two")},
        }
        for name, each in lengths.items():
            tokens = [[row] * int(length) for row, length in enumerate(each)]
            rows = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))})
            table = lakehouse.catalog.create_table(
                f"src.{name}", rows.schema, properties={"write.parquet.row-group-limit": "40"}
            )
            table.append(rows)

    def compare(self, pairs: list[tuple[str, str]]) -> dict[str, Figure]:
        """Train, and return the figures."""
        chance = random.Random(3)
        kinds = dict(zip(pairs, cycle(KINDS), strict=False))
        wanted = sorted({(mesh, kind) for pair, kind in kinds.items() for mesh in (pair[0], "8,1,1,1")})
        for mesh, kind in wanted:
            self.train(_calm(mesh, kind), mesh, kind)
        exact = other_rows = other_bits = kills = 0
        largest = 0.0
        for number, (pair, kind) in enumerate(kinds.items()):
            run = f"pair-{number}"
            kills += self.train(run, pair[0], kind, chance=chance)
            self.train(run, pair[1], kind)
            exact += audit_run(self.lakehouse, run).exact
            other_rows += self.rows(run) != self.rows(_calm("8,1,1,1", kind))
            losses, alone = self.losses(run), self.losses(_calm(pair[0], kind))
            switched = self.steps_of_first_mesh(run)
            other_bits += losses[:switched] != alone[:switched]
            largest = max(largest, *(abs(one - two) / abs(two) for one, two in zip(losses, alone, strict=True)))
            print(json.dumps({"pair": pair, "kind": kind, "steps": len(losses), "switched_at": switched}), flush=True)
        decoded = max(self.decoding(_calm(mesh, kind)) for mesh, kind in wanted)
        return {
            "decoded_row_groups_over_first_rank": Figure(value=decoded, unit="x", bar="<= 1"),
            "pairs": Figure(value=len(pairs), unit="pairs"),
            "kills": Figure(value=kills, unit="kills"),
            "exact": Figure(value=exact, unit=f"of {len(pairs)}", bar=f">= {len(pairs)}"),
            "pairs_with_other_rows": Figure(value=other_rows, unit="pairs", bar="<= 0"),
            "pairs_with_other_bits_on_the_same_mesh": Figure(value=other_bits, unit="pairs", bar="<= 0"),
            "largest_loss_difference": Figure(value=largest, unit="ratio", bar="<= 1e-5"),
        }

    def train(self, run: str, mesh: str, kind: str, *, chance: random.Random | None = None) -> int:
        """Train a run to its end. With `chance` kill a rank, and then all processes. Return the number of kills."""
        process = self.start(spec_of(run, mesh, kind, self.home / run))
        kills = 0
        if chance is not None:
            before = self.checkpoints(run)
            for more, everything in ((1, False), (3, True)):
                self.wait_for(process, run, before + more)
                supervisor, ranks = processes_of(process, run)
                for each in [supervisor, *ranks] if everything else [chance.choice(ranks)]:
                    each.send_signal(signal.SIGKILL)
                kills += 1
        if process.wait(timeout=_LIMIT_S) and chance is None:
            raise RuntimeError(f"expected {run!r} to train on {mesh}, found:\n{self.output(run)[-2000:]}")
        return kills

    def start(self, spec: dict[str, Any]) -> "subprocess.Popen[bytes]":
        """Launch a run."""
        folder = self.home / spec["run"]
        folder.mkdir(exist_ok=True)
        (folder / "job.yaml").write_text(yaml.safe_dump(spec))
        dlac = str(Path(sys.executable).with_name("dlac"))
        with (folder / "output").open("a") as output:
            command = [dlac, "train", str(folder / "job.yaml"), "--home", str(self.home)]
            return subprocess.Popen(command, stdout=output, stderr=output)

    def output(self, run: str) -> str:
        """Return what the launches of a run have printed."""
        return (self.home / run / "output").read_text()

    def wait_for(self, process: "subprocess.Popen[bytes]", run: str, checkpoints: int) -> None:
        """Wait until a run has so many checkpoints."""
        deadline = time.monotonic() + _LIMIT_S
        while self.checkpoints(run) < checkpoints:
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"expected {checkpoints} checkpoints of {run!r}, found {self.checkpoints(run)}")
            time.sleep(0.2)

    def checkpoints(self, run: str) -> int:
        """Return how many checkpoints a run has."""
        return len(Ledger(self.lakehouse).rows(run, kinds=(CheckpointRow,)))

    def losses(self, run: str) -> list[float]:
        """Return the losses of a run, in the order of the steps."""
        return [loss for row in Ledger(self.lakehouse).rows(run, kinds=(CheckpointRow,)) for loss in row.losses]

    def steps_of_first_mesh(self, run: str) -> int:
        """Return the last step that a run committed before its last launch."""
        rows = Ledger(self.lakehouse).rows(run, kinds=(CheckpointRow, ClaimRow))
        last = max(row.attempt for row in rows if isinstance(row, ClaimRow))
        return max(row.step for row in rows if isinstance(row, CheckpointRow) and row.attempt < last)

    def rows(self, run: str) -> dict[int, Rows]:
        """Return the rows of each step by the script's log: those of the last attempt that trained it, by share.

        Raise `AssertionError` if ranks of one share logged other rows.
        """
        found: dict[int, tuple[int, dict[int, Rows]]] = {}
        for entry in (entry for entry in self._entries(run) if entry.get("rows") is not None):
            attempt, shares = found.get(entry["step"], (0, {}))
            if entry["attempt"] > attempt:
                attempt, shares = entry["attempt"], {}
            if entry["attempt"] == attempt and shares.setdefault(entry["share"], entry["rows"]) != entry["rows"]:
                raise AssertionError(f"expected the same rows on all ranks of a share, found others at {entry!r:.200}")
            found[entry["step"]] = attempt, shares
        return {step: [row for share in sorted(shares) for row in shares[share]] for step, (_, shares) in found.items()}

    def decoding(self, run: str) -> float:
        """Return how many row groups the ranks of a share have decoded, for each one of the first of them. The largest of all."""
        by_share: dict[int, list[int]] = {}
        for entry in self._entries(run):
            if "decoded" in entry:
                by_share.setdefault(entry["share"], []).append(entry["decoded"])
        return max(sum(each) / max(each) for each in by_share.values())

    def _entries(self, run: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self.home / run).glob("*.jsonl")):
            lines = path.read_text().splitlines(keepends=True)
            yield from (json.loads(line) for line in lines if line.endswith("\n"))


def processes_of(launch: "subprocess.Popen[bytes]", run: str) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the supervisor and the ranks of a launch."""
    supervisor = psutil.Process(launch.pid)
    children = supervisor.children(recursive=True)
    return supervisor, [each for each in children if f"{run} rank" in " ".join(each.cmdline())]


def _calm(mesh: str, kind: str) -> str:
    return f"calm-{mesh.replace(',', '-')}-{kind}"


def spec_of(run: str, mesh: str, kind: str, folder: Path) -> dict[str, Any]:
    """Return the job spec of a run on a mesh."""
    tables = {"samples": ["samples"], "packed": ["one"], "mixed": ["one", "two"]}[kind]
    sources = [{"table": f"src.{name}", "columns": ["tokens"], "weight": 1.0} for name in tables]
    return {
        "run": run,
        "source": {name: value for name, value in sources[0].items() if len(sources) > 1 or name != "weight"},
        **({"mixture": sources[1:]} if len(sources) > 1 else {}),
        **({} if kind == "samples" else {"sequences": {"length": _LENGTH}}),
        "order": {"batch_size": BATCH, "key_groups": 8, "seed": 5},
        "read": {"shares": "node"},
        "checkpoint": {"every_steps": _EVERY, "memory_every_steps": 2},
        "launch": {"script": str(_PROGRAM), "world_size": _RANKS, "mesh": MESHES[mesh]},
        "params": {"log": str(folder)},
    }


if __name__ == "__main__":
    main()
