"""The example scripts of other trainers under torchrun, killed and restarted: losses, rows and incidents."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import PROGRAMS, wait_until

_EXAMPLES = Path(__file__).parents[3] / "examples"
_FOLDERS = (_EXAMPLES / "trainers", PROGRAMS)
_BIN = Path(sys.executable).parent
_STEPS = 125
SCRIPTS = ("train_ddp.py", "train_huggingface.py", "train_accelerate.py", "train_lightning.py")


class Lake:
    """A folder with the table of the examples, in which their scripts run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "DLAC_HOME": str(home / ".dlac"), "OMP_NUM_THREADS": "1"}
        self.started: list[subprocess.Popen[bytes]] = []
        subprocess.run([sys.executable, _EXAMPLES / "trainers" / "make_table.py"], cwd=home, check=True)
        self.lakehouse = connect(LakehouseConfig().at_home(home / ".dlac"))

    def prepare(self, script: str, run: str, changes: Mapping[str, str] | None = None) -> Path:
        """Copy a script and its job spec into a new folder of the run. `changes` replace text of the spec."""
        folder = self.home / run
        folder.mkdir()
        shutil.copy(next(each / script for each in _FOLDERS if (each / script).exists()), folder)
        job = (_EXAMPLES / "trainers" / "job.toml").read_text()
        for old, new in {'run = "points"': f'run = "{run}"', **(changes or {})}.items():
            assert old in job
            job = job.replace(old, new)
        (folder / "job.toml").write_text(job)
        return folder

    def start(self, script: str, run: str, ranks: int = 0) -> subprocess.Popen[bytes]:
        """Start torchrun with a script, in a folder of the run. Without ranks, start the script alone."""
        folder = self.prepare(script, run)
        torchrun = [
            *(str(_BIN / "torchrun"), "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=2"),
            *("--monitor-interval=0.2", "--rdzv-backend=dlac", f"--rdzv-id={run}", script),
        ]
        with (folder / "log").open("wb") as log:
            command = torchrun if ranks else [sys.executable, script]
            process = subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes], run: str) -> None:
        """Wait for torchrun, which must succeed."""
        assert process.wait(timeout=300) == 0, (self.home / run / "log").read_text()[-5000:]

    def checkpoints(self, run: str) -> list[CheckpointRow]:
        """Return the run's checkpoints, in the order of their steps."""
        return sorted(Ledger(self.lakehouse).rows(run, kinds=(CheckpointRow,)), key=lambda row: row.step)

    def losses(self, run: str) -> list[float]:
        """Return the loss of each step that is committed."""
        return [loss for row in self.checkpoints(run) for loss in row.losses]

    def close(self) -> None:
        """End what still runs."""
        for process in self.started:
            for rank in _descendants(process):
                rank.kill()
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """The examples' table in a folder."""
    lake = Lake(tmp_path_factory.mktemp("trainers"))
    yield lake
    lake.close()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "ranks"),
    [*((script, 1) for script in SCRIPTS[1:]), *((script, 2) for script in (*SCRIPTS, "train_titan.py"))],
)
def test_trainer_resumes_exactly_after_kill(lake: Lake, script: str, ranks: int) -> None:
    """A rank is killed after the second checkpoint. The run, with accumulation and dropout, equals an undisturbed one."""
    run = f"{Path(script).stem}-{ranks}"
    alone = f"{run}-alone"
    killed = lake.start(script, run, ranks)
    wait_until(lambda: len(lake.checkpoints(run)) >= 2 or killed.poll() is not None, what="two checkpoints")
    next(each for each in _descendants(killed) if script in " ".join(each.cmdline())).send_signal(signal.SIGKILL)
    lake.finish(killed, run)
    lake.finish(lake.start(script, alone, ranks if ranks > 1 else 0), alone)
    assert len(lake.losses(run)) == _STEPS
    assert lake.losses(run) == lake.losses(alone)
    audit = audit_run(lake.lakehouse, run)
    assert (audit.exact, audit.rows_consumed) == (True, 19_877)
    assert [each.outcome for each in recoveries_of(lake.lakehouse, run)] == ["resumed"]
    assert not recoveries_of(lake.lakehouse, alone)
