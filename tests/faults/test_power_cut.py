import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows, restorable_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LedgerRow, LegRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import JobSpec, read_spec
from tests.conftest import PROGRAMS
from tests.power_cut import Disk, Names
from tests.small_records import raw_spec

RUN = "r"
STEPS = 6
_STRIDE = 5
"""Distance of the tested moments. The damage of a missing sync lasts longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recorded run from an empty disk to its end, with a checkpoint at every other step and retention of the last one."""

    disk: Disk
    path: Path

    @property
    def spec(self) -> JobSpec:
        """Return its job spec."""
        return read_spec(self.path).resolved(self.disk.root / "home")

    def train(self, environment: dict[str, str]) -> None:
        """Train from the current state to the end."""
        places = {"DLAC_HOME": str(self.disk.root / "home"), "PYTHONPATH": str(PROGRAMS.parents[1])}
        program = [sys.executable, str(PROGRAMS / "train_with_power_cut.py"), str(self.path)]
        subprocess.run(program, check=True, env={**environment, **places})

    @property
    def moments(self) -> list[int]:
        """Return the moments before and after each acknowledgement, and some in between."""
        every = range(1, self.disk.moments)
        steps = [moment for moment in every if self.acknowledged(moment) != self.acknowledged(moment - 1)]
        return sorted({*every[::_STRIDE], *steps, *(moment - 1 for moment in steps), every[-1]})

    def acknowledged(self, moment: int) -> int:
        """Return the last step whose checkpoint was acknowledged at a moment."""
        return max((int(step) for step in self.disk.marks(moment)), default=0)

    def rows_left(self) -> list[LedgerRow]:
        """Return the run's ledger rows after a power cut, and check that all files that they name are whole."""
        spec = self.spec
        if not Path(spec.lakehouse.uri.removeprefix("sqlite:///")).is_file():
            return []
        lakehouse = connect(spec.lakehouse)
        rows = Ledger(lakehouse).rows(RUN)
        for checkpoint in restorable_rows(rows).values():
            restore(checkpoint, tiers_of(spec))
        for row in rows:
            if isinstance(row, LegRow):
                open_leg(Plans(lakehouse), Leg.from_record(row.record), spec)
        return rows


@pytest.fixture(scope="module", params=["one place", "copied to a store"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The recorded run, with its checkpoints in one place, or copied from a local folder to the store."""
    folder = tmp_path_factory.mktemp("power")
    disk = Disk(folder / "disk", folder / "log")
    store = {} if request.param == "one place" else {"local": str(folder / "fast"), "store": str(disk.root / "store")}
    checkpoint = {"every_steps": 2, "keep_last": 1, **store}
    launch = {"script": str(PROGRAMS / "train_with_power_cut.py")}
    order = {"batch_size": 8, "key_groups": 2}
    raw = raw_spec(source={"columns": ["row_id", "x"]}, order=order, checkpoint=checkpoint, launch=launch)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**raw, "run": RUN}))
    made = Recorded(disk=disk, path=path)
    made.train(disk.environment)
    return made


@pytest.mark.soak
@pytest.mark.parametrize("names", ["synced", "early"])
def test_power_cut_keeps_invariants(recorded: Recorded, names: Names) -> None:
    """After a power cut at any moment, all files that the ledger names are whole, and no acknowledged checkpoint is lost."""
    for moment in recorded.moments:
        recorded.disk.cut(moment, names)
        rows = recorded.rows_left()
        head = checkpoint_rows(rows).get(fence_of_rows(rows).head or "", CheckpointRow())
        assert head.step >= recorded.acknowledged(moment), f"moment {moment} of {recorded.disk.moments}"
    assert recorded.acknowledged(recorded.disk.moments) == STEPS


@pytest.mark.soak
def test_training_resumes_after_cut(recorded: Recorded) -> None:
    """A run that lost power after its first checkpoint trains to its end, and is exact."""
    recorded.disk.cut(next(moment for moment in range(recorded.disk.moments) if recorded.acknowledged(moment)))
    recorded.train({**recorded.disk.environment, "LD_PRELOAD": ""})
    assert audit_run(connect(recorded.spec.lakehouse), RUN).exact
    assert restorable_rows(Ledger(connect(recorded.spec.lakehouse)).rows(RUN)).popitem()[1].step == STEPS
