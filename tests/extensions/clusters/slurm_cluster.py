"""A real Slurm without privileges or accounting: slurmctld and three slurmd on this node, for this user, in a folder."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until
from tests.ports import own_port

_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
"""Debian installs the daemons outside of some users' search path."""
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
needs_slurm = pytest.mark.skipif(
    any(shutil.which(program, path=_PATH) is None for program in _PROGRAMS),
    reason=f"needs Slurm's {', '.join(_PROGRAMS)}: apt-get install slurm-wlm",
)
NODES = ("n1", "n2", "n3")
CONFIGURATION = """
ClusterName=dlac
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=6
CryptoType=crypto/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=4
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=n[1-3] Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=n[1-3] PriorityTier=10 PreemptMode=OFF State=UP
"""
"""`cred_expire` is also how long a requeued job waits in the queue."""


class SlurmCluster:
    """A controller, and the nodes n1 to n3 with two processors each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        nodes = [f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own_port()} CPUs=2" for name in NODES]
        text = CONFIGURATION.format(
            host=host, port=own_port(), user=getpass.getuser(), folder=folder, nodes="\n".join(nodes)
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").touch()

    def start(self, name: str) -> None:
        """Start the controller, or a node."""
        daemon = ["slurmctld", "-D"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(daemon, stdout=log, stderr=log, start_new_session=True)

    def wait_until_idle(self) -> None:
        """Wait until all nodes can take a job."""
        wait_until(
            lambda: "idle 3" in self.ask("sinfo", "-h", "-p", "low", "-o", "%t %D"), what="idle nodes", within_s=60
        )

    def stop(self, name: str) -> None:
        """Stop a daemon. Its jobs continue."""
        self._daemons[name].terminate()
        self._daemons.pop(name).wait()

    def lose(self, name: str) -> None:
        """Kill a node with all its processes, before any of them can report."""
        found = [process for process in psutil.process_iter() if _node_of(process) == name]
        sessions = {_session_of(process) for process in found} - {None}
        shepherds = [one for one in psutil.process_iter(["name"]) if one.info["name"] == "slurmstepd"]
        found += [shepherd for shepherd in shepherds if _session_of(shepherd) in sessions]
        daemon = self._daemons.pop(name)
        found.append(psutil.Process(daemon.pid))
        for kill in (psutil.Process.suspend, psutil.Process.kill):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    kill(process)
        daemon.wait()

    def ask(self, *command: str) -> str:
        """Return the output of a Slurm command, or an empty text if it fails."""
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def job(self, number: str) -> str:
        """Return the facts of a job, in one line."""
        return self.ask("scontrol", "--oneliner", "show", "job", number)

    def close(self) -> None:
        """End all jobs, then the daemons."""
        self.ask("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
        self.ask("scancel", f"--user={getpass.getuser()}")
        for name in NODES:
            if name in self._daemons:
                self.lose(name)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()


def _node_of(process: psutil.Process) -> str | None:
    """Return the node on which Slurm started a process."""
    try:
        return process.environ().get("SLURMD_NODENAME")
    except psutil.Error:
        return None


def _session_of(process: psutil.Process) -> int | None:
    """Return the session of a process, which it shares with the shepherd that Slurm started for it."""
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


@contextmanager
def slurm_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Yield a running Slurm that this process's commands use."""
    cluster = SlurmCluster(folder)
    monkeypatch.setenv("PATH", _PATH)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    try:
        for name in ("slurmctld", *NODES):
            cluster.start(name)
        cluster.wait_until_idle()
        yield cluster
    finally:
        cluster.close()
