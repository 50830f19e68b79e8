"""Faults on a run of a 2 x 2 x 2 mesh: `python -m benchmarks.mesh_soak [--quick]`.

By turns a rank is killed, a rank stops without dying, the node is lost with its memory, all processes are killed, a preemption
ends the launch, and the newest checkpoint is damaged while nothing runs: 40 faults, or one of each with --quick. A fault is
healed once a later step is committed. Rows are counted by the audit, and by the log that the script writes itself: each pass
over the table has each row once.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.mesh import BATCH, SAMPLES, Lab, processes_of, spec_of
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.extensions.chaos.strikes import damage_file
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.memory_states.states import memory_folder
from dlac_pipeline.spec.job_spec import parse_spec

KINDS = ("rank", "hang", "node", "all", "preemption", "damaged")
_RUN, _MESH = "soaked", "2,2,2,1"
_HEALED_WITHIN_S = 400.0
_HANG_S = 20.0


def main() -> None:
    """Strike, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    count = len(KINDS) if parser.parse_args().quick else 40
    with tempfile.TemporaryDirectory(prefix="dlac-mesh-soak-") as home:
        lab = Lab(Path(home))
        lab.make_tables()
        report("mesh_soak", Soak(lab).run(count))


class Soak:
    """The run, and its launches."""

    def __init__(self, lab: Lab) -> None:
        spec = spec_of(_RUN, _MESH, "samples", lab.home / _RUN)
        spec["source"]["passes"] = 0
        spec["order"]["steps"] = 100_000
        spec["checkpoint"] = {"every_s": 3, "keep_last": 3}
        spec["launch"]["hang_timeout_s"] = _HANG_S
        self._lab, self._spec = lab, spec
        self._launch = lab.start(spec)
        self._chance = random.Random(11)

    def run(self, count: int) -> dict[str, Figure]:
        """Strike so often, and return the figures."""
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._wait(0, more=2)
        for kind in islice(cycle(KINDS), count):
            began = time.monotonic()
            self._strike(kind)
            self._wait(self._steps(), more=1)
            seconds[kind].append(time.monotonic() - began)
            print(json.dumps({"kind": kind, "seconds": seconds[kind][-1], "step": self._steps()}), flush=True)
        self._end(signal.SIGTERM)
        rows = self._lab.rows(_RUN)
        audit = audit_run(self._lab.lakehouse, _RUN)
        in_pass = SAMPLES // BATCH
        passes = len(rows) // in_pass
        wrong = sum(
            sorted(row[0] for step in range(first * in_pass, (first + 1) * in_pass) for row in rows[step + 1])
            != [*range(SAMPLES)]
            for first in range(passes)
        )
        return {
            "faults": Figure(value=count, unit="faults"),
            "healed": Figure(value=sum(map(len, seconds.values())), unit="faults", bar=f">= {count}"),
            "audit_exact": Figure(value=audit.exact, unit="of 1", bar=">= 1"),
            "passes": Figure(value=passes, unit="passes", bar=">= 1"),
            "passes_with_other_rows": Figure(value=wrong, unit="passes", bar="<= 0"),
            **{f"{kind}_s": Figure(value=statistics.median(each), unit="s") for kind, each in seconds.items() if each},
            "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
        }

    def _strike(self, kind: str) -> None:
        supervisor, ranks = processes_of(self._launch, _RUN)
        if kind in ("rank", "hang"):
            self._chance.choice(ranks).send_signal(signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
            return
        if kind == "preemption":
            self._end(signal.SIGTERM)
        else:
            for each in (supervisor, *ranks):
                each.kill()
            self._launch.wait()
            if kind != "all":
                spec = parse_spec(self._spec, origin="the soak").resolved(self._lab.home)
                shutil.rmtree(memory_folder(spec) or "", ignore_errors=True)
            if kind == "damaged":
                head = Ledger(self._lab.lakehouse).rows(_RUN, kinds=(CheckpointRow,))[-1]
                damage_file(folder_of(head.manifest_uri), self._chance, flip=True)
        self._launch = self._lab.start(self._spec)

    def _end(self, number: int) -> None:
        self._launch.send_signal(number)
        self._launch.wait(timeout=_HEALED_WITHIN_S)

    def _steps(self) -> int:
        return max((row.step for row in self._checkpoints()), default=0)

    def _checkpoints(self) -> list[Any]:
        return Ledger(self._lab.lakehouse).rows(_RUN, kinds=(CheckpointRow,))

    def _wait(self, step: int, *, more: int) -> None:
        """Wait until so many checkpoints after a step are committed."""
        deadline = time.monotonic() + _HEALED_WITHIN_S
        while len({row.step for row in self._checkpoints() if row.step > step}) < more:
            if self._launch.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"expected a checkpoint after step {step}, found:\n{self._lab.output(_RUN)[-3000:]}")
            time.sleep(0.5)


if __name__ == "__main__":
    main()
