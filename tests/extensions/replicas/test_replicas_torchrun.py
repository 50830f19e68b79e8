"""Replica groups without a supervisor: a separate torchrun starts each group, as torchft's examples do."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.replicas.rank import is_held, read_lighthouse
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow, MembershipRow
from tests.conftest import PROGRAMS, Arena, Steps, wait_until
from tests.extensions.replicas.replica_runs import STEPS, Journals, entries_of

pytest.importorskip("torchft")

TORCHRUN = Path(sys.executable).with_name("torchrun")


class Groups:
    """The groups of one run, each with its torchrun."""

    def __init__(self, campaign: Arena, run: str, **changes: Any) -> None:
        """`changes` are fields of the job spec."""
        settings = {"replicas": 3, "world_size": 1, "steps": STEPS, "pause_s": 0.03, "last_call_s": 60, **changes}
        self.run, self._campaign = run, campaign
        self.spec = campaign.spec(run, "train_replicas.py", **settings)
        self._file = campaign.home / f"{run}.yaml"
        self._file.write_text(yaml.safe_dump(self.spec.model_dump(mode="json")))
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *groups: int, options: Sequence[str] = ("--max-restarts=5",), **environment: str) -> None:
        """Start torchrun for some groups."""
        launch = self.spec.launch
        for group in groups:
            if group in self._agents:
                self._agents[group].wait()
            ranks = f"--nproc-per-node={launch.ranks_per_replica}"
            command = [str(TORCHRUN), "--standalone", ranks, "--monitor-interval=0.1", *options]
            command.append(str(PROGRAMS / "train_replicas.py"))
            variables = {
                **{**os.environ, "JOB_SPEC": str(self._file), "DLAC_HOME": str(self._campaign.home)},
                **{"OMP_NUM_THREADS": "1", "REPLICA_GROUP_ID": str(group), **environment},
            }
            with self._log(group).open("ab") as log:
                self._agents[group] = subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def wait(self, *, within_s: float = 200.0) -> list[int]:
        """Wait for all torchruns, and return their exit statuses."""
        return [agent.wait(within_s) for agent in self._agents.values()]

    def stop(self, group: int) -> None:
        """Send SIGTERM to a torchrun."""
        self._agents[group].terminate()

    def kill(self, group: int) -> None:
        """Kill the first rank of a group, which its torchrun starts again."""
        os.kill(int((self.folder / f"group-{group:05d}.lock").read_text()), signal.SIGKILL)

    def wait_for_step(self, step: int) -> None:
        """Wait until a group has committed a step."""
        wait_until(lambda: any(each["step"] >= step for each in self._committed()), what=f"step {step} of {self.run}")

    @property
    def agents(self) -> list[subprocess.Popen[bytes]]:
        """The torchruns."""
        return list(self._agents.values())

    @property
    def folder(self) -> Path:
        """The launch folder of the groups that train."""
        run_folder = self._campaign.home / "checkpoints" / self.run
        return run_folder / (run_folder / "launch-of-groups").read_text()

    @property
    def journals(self) -> Journals:
        """What the ranks have read and committed."""
        return Journals(entries_of(self._campaign, self.run))

    @property
    def logs(self) -> str:
        """The ends of the outputs."""
        return "\n".join(self._log(group).read_text()[-4000:] for group in self._agents)

    def end(self) -> None:
        """Kill what is left."""
        for agent in self._agents.values():
            with suppress(psutil.NoSuchProcess):
                for process in (psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)):
                    process.kill()
            agent.wait()

    def _committed(self) -> list[dict[str, Any]]:
        return [each for each in entries_of(self._campaign, self.run) if each["event"] == "committed"]

    def _log(self, group: int) -> Path:
        return self._campaign.home / f"{self.run}-group-{group}.log"


@pytest.fixture
def groups_of(campaign: Arena) -> Iterator[Any]:
    """Yield a function that makes the groups of a run."""
    made: list[Groups] = []

    def make(run: str, **changes: Any) -> Groups:
        made.append(Groups(campaign, run, **changes))
        return made[-1]

    yield make
    for groups in made:
        groups.end()


def check_exact(campaign: Arena, groups: Groups, *, attempts: Sequence[int] = (1,)) -> Steps:
    """Check the journals against the ledger, and return them. They have the batches of the ordinary run."""
    assert groups.wait() == [0] * len(groups.wait()), groups.logs
    reference = campaign.journal("reference")
    journal = groups.journals.journal
    assert journal == {step: reference[step] for step in range(1, STEPS + 1)}
    assert audit_run(campaign.lakehouse, groups.run).exact
    assert [row.attempt for row in campaign.rows(groups.run, ClaimRow)] == list(attempts)
    return journal


def memberships(campaign: Arena, run: str) -> list[tuple[int, ...]]:
    """Return the groups of each change, in order."""
    return [tuple(row.groups) for row in campaign.rows(run, MembershipRow)]


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 0])
def test_dead_group_rejoins(campaign: Arena, groups_of: Any, group: int) -> None:
    """SIGKILL of a group, also of the coordinator's: torchrun starts it, and a peer gives it the state."""
    groups = groups_of(f"torchrun-dies-{group}", awaits=f"{group}:40")
    groups.start(0, 1, 2)
    groups.wait_for_step(12)
    groups.kill(group)
    check_exact(campaign, groups)
    processes = {rank: len(pids) for rank, pids in groups.journals.processes.items()}
    assert processes == {rank: 1 + (rank == group) for rank in range(3)}
    others = tuple(each for each in range(3) if each != group)
    assert memberships(campaign, groups.run) == [(0, 1, 2), others, (0, 1, 2)]
    (found,) = recoveries_of(campaign.lakehouse, groups.run)
    assert (found.outcome, found.noticed_by, found.attempt) == ("rejoined", "torchrun", 1)
    assert re.fullmatch(rf"group {group} died, while \w+", found.cause)
    assert found.total_s > found.detect_s >= 0
    lighthouse = read_lighthouse(groups.folder)
    assert lighthouse is not None
    wait_until(lambda: not psutil.pid_exists(lighthouse.pid), what="the end of the lighthouse")


@pytest.mark.slow
def test_all_groups_die(campaign: Arena, groups_of: Any) -> None:
    """The first one to be started again claims the run, and all resume from the last checkpoint."""
    groups = groups_of("torchrun-all-die", dies_forward="*:17")
    groups.start(0, 1, 2)
    check_exact(campaign, groups, attempts=(1, 2))
    (found,) = recoveries_of(campaign.lakehouse, groups.run)
    assert (found.outcome, found.noticed_by, found.resumed_step) == ("resumed", "torchrun", 10)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_groups_outlive_lighthouse(campaign: Arena, groups_of: Any, number: signal.Signals) -> None:
    """A lighthouse that dies or hangs is replaced. No group is, and no step is repeated."""
    groups = groups_of(f"torchrun-dark-{number.name}", pause_s=0.1)
    groups.start(0, 1, 2)
    groups.wait_for_step(12)
    lighthouse = read_lighthouse(groups.folder)
    assert lighthouse is not None
    os.kill(lighthouse.pid, number)
    check_exact(campaign, groups)
    replaced = read_lighthouse(groups.folder)
    assert replaced is not None
    assert replaced.pid != lighthouse.pid
    assert {len(pids) for pids in groups.journals.processes.values()} == {1}
    present = memberships(campaign, groups.run)  # a group that stands still for 0.4 s is left out until it comes back
    assert present[-1] == (0, 1, 2)


@pytest.mark.slow
def test_groups_without_restarts_train_on(campaign: Arena, groups_of: Any) -> None:
    """A group that torchrun does not start again is left out. A later one takes its number."""
    groups = groups_of("torchrun-late", awaits="2:40")
    groups.start(0, 1, 2, options=("--max-restarts=0",))
    groups.wait_for_step(8)
    groups.kill(2)
    groups.wait_for_step(14)
    groups.start(2, JOINS_LATE="1")
    check_exact(campaign, groups)
    assert memberships(campaign, groups.run) == [(0, 1, 2), (0, 1), (0, 1, 2)]


@pytest.mark.slow
def test_death_of_torchrun_costs_its_group(campaign: Arena, groups_of: Any) -> None:
    """Its rank ends by itself, and its peers finish the run."""
    groups = groups_of("torchrun-torchrun-dies", pause_s=0.2)
    groups.start(0, 1, 2)
    groups.wait_for_step(8)
    groups.agents[2].kill()
    groups.agents[2].wait()
    wait_until(lambda: not is_held(groups.folder, 2), what="the end of group 2")
    assert [agent.wait(200) for agent in groups.agents[:2]] == [0, 0], groups.logs
    assert audit_run(campaign.lakehouse, groups.run).exact
    assert memberships(campaign, groups.run) == [(0, 1, 2), (0, 1)]


@pytest.mark.slow
def test_sharded_group_rejoins(campaign: Arena, groups_of: Any) -> None:
    """SIGKILL of one rank of a group of two: torchrun starts both, and each has its shards from its counterpart."""
    groups = groups_of("torchrun-sharded", replicas=2, ranks_per_replica=2, sharded=1, awaits="2:40")
    groups.start(0, 1)
    groups.wait_for_step(12)
    groups.kill(1)
    check_exact(campaign, groups)
    assert memberships(campaign, groups.run) == [(0, 1), (0,), (0, 1)]


@pytest.mark.slow
def test_wrong_launches_are_refused(campaign: Arena, groups_of: Any) -> None:
    """Each says what it expected. The groups that train do not notice, and SIGTERM to one torchrun stops all of them."""
    groups, numbered, sized = (
        groups_of(f"torchrun-{name}", replicas=2, pause_s=3.0) for name in ("refused", "numbered", "sized")
    )
    once = ("--max-restarts=0",)
    groups.start(0, 1)
    groups.wait_for_step(2)
    numbered.start(2, options=once)
    sized.start(0, options=(*once, "--nproc-per-node=2"))
    launch = campaign.launch(groups.spec)
    assert launch.wait() == 81, launch.stderr
    assert [each.wait() for each in (numbered, sized)] == [[1]] * 2
    assert "expected REPLICA_GROUP_ID of 0 to 1 for a replica group that" in numbered.logs
    assert "found 2 ranks, 2 of them here: give torchrun --nproc-per-node 1" in sized.logs
    groups.stop(1)
    assert groups.wait()[0] == 0, groups.logs
    (head, *_) = reversed(campaign.lineage(groups.run))
    reference = campaign.journal("reference")
    assert groups.journals.journal == {step: reference[step] for step in range(1, head.step + 1)}
    assert audit_run(campaign.lakehouse, groups.run).exact
    assert [row.attempt for row in campaign.rows(groups.run, ClaimRow)] == [1]
    assert not any(is_held(groups.folder, group) for group in range(2))
    assert not recoveries_of(campaign.lakehouse, groups.run)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_many_deaths(campaign: Arena, groups_of: Any, seed: int) -> None:
    """Groups and lighthouses die at random moments, also several at once, and groups while they come back."""
    groups = groups_of(f"torchrun-many-{seed}", pause_s=0.6)
    groups.start(0, 1, 2, options=("--max-restarts=50",))
    groups.wait_for_step(3)
    draw, deadline = random.Random(seed), time.monotonic() + 45
    while time.monotonic() < deadline and not all(agent.poll() is not None for agent in groups.agents):
        time.sleep(draw.uniform(0.0, 6.0))
        struck = draw.choice(["one", "one", "two", "all", "lighthouse"])
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):
            if struck == "lighthouse" and (lighthouse := read_lighthouse(groups.folder)) is not None:
                os.kill(lighthouse.pid, signal.SIGKILL)
            for group in draw.sample(range(3), {"one": 1, "two": 2, "all": 3}.get(struck, 0)):
                groups.kill(group)
    check_exact(campaign, groups, attempts=[row.attempt for row in campaign.rows(groups.run, ClaimRow)])
    assert {each.outcome for each in recoveries_of(campaign.lakehouse, groups.run)} <= {
        "rejoined",
        "resumed",
        "failed again",
    }
