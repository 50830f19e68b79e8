"""Kills of a catalog and its object store under a run, in uploads and in commits: `python -m benchmarks.soak_servers [--quick]`.

One process of SeaweedFS is the Iceberg REST catalog and the S3 store of all tables and checkpoints. It gets SIGKILL while a
checkpoint is uploaded or while the ledger's commit is on its way, in turn, and is started again after up to 2 seconds. A fault
is healed once a later checkpoint is committed. Then the run finishes, and has to be exact by the audit, by the journal of the
training function, and bit by bit in its losses, compared with an earlier run without faults. No rank and no supervisor is killed,
so the run needs one attempt. 40 faults by default, `--faults` sets another number, `--quick` is 4.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import Figure, report
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.kept_checkpoints.listing import verify_checkpoints
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.launches import Launch
from tests.served_lakehouses import ServedLakehouse, served_lakehouse

_KINDS = ("upload", "commit")
_RUN, _ALONE = "soak-servers", "alone"
_EVERY = 5
_PASSES_PER_FAULT = 0.5
"""One pass has 62 steps, and a fault takes some of them."""
_AWAY_S = (0.2, 2.0)
_DELAY_S = (0.0, 0.05)
"""From the beginning of an upload or a commit to the kill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One healed kill of the server."""

    kind: str
    step: int
    """Step of the head at the kill."""
    away_s: float
    healed_s: float
    """Seconds from the kill to the next checkpoint."""


class Campaign:
    """One run whose servers are killed."""

    def __init__(self, arena: Arena, served: ServedLakehouse, watched: Path, *, faults: int, seed: int) -> None:
        self.arena = arena
        self._server = served.server
        self._watched = watched
        self._chance = random.Random(seed)
        self.spec = self._job(_RUN, faults, every_steps=_EVERY, pause_s=0.05)
        self._finish(arena.launch(self._job(_ALONE, faults, every_steps=100)))
        self._launch = arena.launch(self.spec)
        self._launch.wait_for("checkpoint")

    def strike(self, kind: str) -> Fault:
        """Kill the server in the next upload or commit, start it again, and wait for a checkpoint."""
        mark = self._watched / kind
        mark.unlink(missing_ok=True)
        wait_until(mark.exists, what=f"a checkpoint's {kind}", pause_s=0.002)
        time.sleep(self._chance.uniform(*_DELAY_S))
        before, began = self._launch.of("checkpoint")[-1]["step"], time.monotonic()
        self._server.kill()
        away_s = self._chance.uniform(*_AWAY_S)
        time.sleep(away_s)
        self._server.start()
        wait_until(lambda: self._launch.of("checkpoint")[-1]["step"] > before, what=f"a checkpoint after step {before}")
        healed_s = time.monotonic() - began
        return Fault(kind=kind, step=before, away_s=round(away_s, 2), healed_s=round(healed_s, 2))

    def finish(self) -> None:
        """Wait for the end of the run."""
        self._finish(self._launch)

    def _job(self, run: str, faults: int, **changes: Any) -> JobSpec:
        passes, watched = 2 + int(_PASSES_PER_FAULT * faults), {"WATCHED": str(self._watched)}
        program = str(Path(__file__).with_name("programs") / "train_watched.py")
        return self.arena.spec(run, program, env=watched, passes=passes, **changes)

    def _finish(self, launch: Launch) -> None:
        if launch.wait() != 0:
            raise AssertionError(f"expected the run to finish, found {launch.stderr[-2000:]}")


def main() -> int:
    """Run a campaign. Return the exit status."""
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=40)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--quick", action="store_true")
    chosen = options.parse_args()
    kinds = list(islice(cycle(_KINDS), 4 if chosen.quick else chosen.faults))
    healed: list[Fault] = []
    with (
        tempfile.TemporaryDirectory(prefix="dlac-soak-servers-") as name,
        pytest.MonkeyPatch.context() as patch,
        served_lakehouse("seaweedfs", _made(name, "served")) as served,
    ):
        arena = Arena(_made(name, "home"), patch, served.config, served.store)
        arena.table()
        campaign = Campaign(arena, served, _made(name, "watched"), faults=len(kinds), seed=chosen.seed)
        try:
            for kind in kinds:
                healed.append(campaign.strike(kind))
                print(json.dumps(asdict(healed[-1])), flush=True)
            campaign.finish()
        except (AssertionError, LookupError) as err:
            print(f"not healed: {err!r}", flush=True)
        figures = {
            "faults": Figure(value=len(kinds), unit="faults"),
            "healed": Figure(value=len(healed), unit="faults", bar=f">= {len(kinds)}"),
            **_seconds_of(healed),
            **_account_of(arena, campaign.spec),
        }
        arena.close()
    report("soak_servers", figures)
    return 0 if all(figure.holds for figure in figures.values()) else 1


def _made(above: str, name: str) -> Path:
    folder = Path(above) / name
    folder.mkdir()
    return folder


def _seconds_of(healed: Sequence[Fault]) -> dict[str, Figure]:
    by_kind = {kind: [fault.healed_s - fault.away_s for fault in healed if fault.kind == kind] for kind in _KINDS}
    return {
        f"{kind}_healed_s": Figure(value=statistics.median(found), unit=f"s after the restart, median of {len(found)}")
        for kind, found in by_kind.items()
        if found
    }


def _account_of(arena: Arena, spec: JobSpec) -> dict[str, Figure]:
    """Return the final checks of the run."""
    journal, recorded = arena.journal(_RUN), sorted(chain(*arena.recorded(_RUN).values()))
    bad = [
        verdict for verdict in verify_checkpoints(arena.lakehouse, _RUN, files=tiers_of(spec).files) if verdict.problem
    ]
    return {
        "steps": Figure(value=len(journal), unit="steps"),
        "checkpoints": Figure(value=len(arena.rows(_RUN, CheckpointRow)), unit="checkpoints"),
        "attempts": Figure(value=len(arena.rows(_RUN, ClaimRow)), unit="attempts", bar="<= 1"),
        "damaged_checkpoints": Figure(value=len(bad), unit="checkpoints", bar="<= 0"),
        "audit_exact": Figure(value=audit_run(arena.lakehouse, _RUN).exact, unit="of 1", bar=">= 1"),
        "journal_agrees": Figure(value=recorded == sorted(chain(*journal.values())), unit="of 1", bar=">= 1"),
        "batches_as_undisturbed": Figure(value=journal == arena.journal(_ALONE), unit="of 1", bar=">= 1"),
        "losses_as_undisturbed": Figure(value=arena.losses(_RUN) == arena.losses(_ALONE), unit="of 1", bar=">= 1"),
    }


if __name__ == "__main__":
    sys.exit(main())
