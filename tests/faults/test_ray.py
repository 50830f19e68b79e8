"""Ray Train with one or two workers: a node joins, a worker is killed, the node is lost, and the run stays exact."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.conftest import wait_until
from tests.extensions.trainers.test_trainers import Lake, lake
from tests.ports import own_port

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'dlac-pipeline[trainers]'"),
]
__all__ = ["lake"]
_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats"]
_PASSES = 24
_ALONE = "import os, train_ray; train_ray.train({'job': os.path.abspath('job.toml')})"


class Cluster:
    """A Ray cluster on this node. Each start adds a node with one processor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{own_port()}"
        self.environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "HOME": str(folder)}
        self.environment |= {"RAY_ADDRESS": self.address, "OMP_NUM_THREADS": "1"}

    def start_node(self, *, head: bool = False) -> None:
        """Start a node."""
        place = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        place += [f"--temp-dir={self.folder}"]
        arguments = place if head else [f"--address={self.address}"]
        with (self.folder / "ray.log").open("ab") as log:
            started = subprocess.run([*_RAY, *arguments], env=self.environment, check=False, stdout=log, stderr=log)
        assert not started.returncode, (self.folder / "ray.log").read_text()[-3000:]

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the cluster: those with its address or its folder in their environment."""
        return [each for each in psutil.process_iter() if self._owns(each)]

    def workers(self) -> list[psutil.Process]:
        """Return the processes that train."""
        return [each for each in self.processes() if "RayTrainWorker" in " ".join(each.cmdline())]

    def lose_node(self) -> None:
        """Kill the node that was started last, with its workers."""
        node = max((each for each in self.processes() if each.name() == "raylet"), key=psutil.Process.create_time)
        for process in [node, *node.children(recursive=True)]:
            process.kill()

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes():
            process.kill()

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get("HOME") == str(self.folder)
        except psutil.Error:
            return False


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster with one node, in a folder with a short path, as sockets need it."""
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start_node(head=True)
            yield cluster
        finally:
            cluster.close()


def test_ray_workers_join_and_die(lake: Lake, cluster: Cluster) -> None:
    """One worker trains, two, two after a kill, and one again. Losses are an undisturbed worker's but for rounding."""
    job = {"batch_size = 160": f"passes = {_PASSES}\nbatch_size = 160"}
    folder = lake.prepare("train_ray.py", "elastic", job)
    environment = {**lake.environment, **cluster.environment}
    with (folder / "log").open("wb") as log:
        training = subprocess.Popen(
            [sys.executable, "train_ray.py"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    lake.started.append(training)

    def wait_for(world_size: int, attempt: int) -> None:
        def is_over() -> bool:
            found = [(row.world_size, row.attempt) for row in lake.checkpoints("elastic")]
            return (world_size, attempt) in found or training.poll() is not None

        wait_until(is_over, what=f"a checkpoint of {world_size} workers")

    wait_for(1, 1)
    cluster.start_node()
    wait_for(2, 2)
    cluster.workers()[0].send_signal(signal.SIGKILL)
    wait_for(2, 3)
    cluster.lose_node()
    wait_for(1, 4)
    lake.finish(training, "elastic")
    folder = lake.prepare("train_ray.py", "ray-alone", {**job, "every_steps = 20": "every_steps = 100"})
    subprocess.run([sys.executable, "-c", _ALONE], cwd=folder, env=lake.environment, check=True)
    assert lake.losses("elastic") == pytest.approx(lake.losses("ray-alone"), rel=1e-5, abs=1e-7)
    attempts = {(row.attempt, row.world_size) for row in lake.checkpoints("elastic")}
    assert attempts == {(1, 1), (2, 2), (3, 2), (4, 1)}
    audit = audit_run(lake.lakehouse, "elastic")
    assert (audit.exact, audit.rows_consumed) == (True, _PASSES * 19_877)
    assert len(recoveries_of(lake.lakehouse, "elastic")) == 3
