"""One recovery: start all nodes, kill some, wait until every other node has the verified resume point."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.control_lab.simulated_nodes import Message, SimulatedNodes, run_nodes
from dlac_pipeline.spec.job_spec import JobSpec

COUNTED = ("cpu_s", "children_cpu_s", "operations", "sent_bytes", "received_bytes", "messages")
LEADER, ONE, EIGHT, RACK = "leader", "one", "eight", "rack"
KILLED = {LEADER: 1, ONE: 1, EIGHT: 8, RACK: 32}
"""Number of nodes that a scenario kills."""
_START_S = 300.0
_RECOVER_S = 300.0
_SETTLE_S = 6.0
"""Seconds until nodes are as quiet as in the middle of a training."""
_IDLE_S = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Figures of one recovery: seconds since the kill, and the nodes' resource use from the kill until the resume point."""

    nodes: int
    scenario: str
    start_s: float
    """Time from when all nodes could meet until all had the first attempt's resume point."""
    idle: Mapping[str, float]
    """Median resource use per second of a follower while all train."""
    noticed_s: float
    """Time until the leader knew the lost nodes."""
    formed_s: float
    """Time until the leader had the plan of the next round."""
    claim_s: float
    verify_s: float
    announced_s: float
    """Time until the leader had claimed the run and verified the checkpoint."""
    point_s: float
    """Time until the last node had recorded the resume point."""
    wall_s: float
    """Time until the last node had the resume point and its ranks were processes."""
    leader: Mapping[str, float]
    """Resource use of the node that led the recovery."""
    others: Mapping[str, float]
    """Median resource use of the other nodes."""
    most: Mapping[str, float]
    """Maximum resource use of the other nodes."""
    leader_busy_s: float
    """Processor time of the leader since it knew the loss. The time before belongs to the timeout."""
    server_cpu_s: float
    """Processor time of the store's process from the kill until the end."""
    server_busy_s: float
    """Processor time of the store's process since the loss was known."""
    attempts: int
    """Number of attempts: 1, unless one failed."""
    memory_mb: float
    """Memory of all supervisors that they do not share."""


def recover(spec: JobSpec, home: Path, *, nodes: int, scenario: str) -> Recovery:
    """Start the nodes, kill as the scenario requires, and measure."""
    with run_nodes(spec, home, nodes=nodes) as simulated:
        started = _await_resumed(simulated, after=0, within_s=_START_S)
        start_s = max(each["at"] for each in started.values()) - simulated.opened_at
        attempt = max(each["attempt"] for each in started.values())
        simulated.listen(_SETTLE_S)
        idle = _idle(simulated, leader=_leader(started))
        before, server_before = simulated.counts(), _processor_s(simulated.server_pid)
        at = simulated.kill(_victims(simulated, scenario, _leader(started)))
        failures: list[Message] = []
        resumed = _await_resumed(simulated, after=attempt, within_s=_RECOVER_S, failures=failures)
        server_cpu_s = _processor_s(simulated.server_pid)
        memory_mb = simulated.memory_bytes / 2**20
        leader = _leader(resumed)
        used = {number: _less(resumed[number], before[number]) for number in simulated.alive}
        points = {number: _point_of(home, number) for number in simulated.alive}
    noticed = next(each for each in failures if each["node"] == leader)
    others = [each for number, each in used.items() if number != leader]
    point = json.loads(points[leader].read_bytes())
    return Recovery(
        nodes=nodes,
        scenario=scenario,
        start_s=start_s,
        idle=idle,
        noticed_s=noticed["at"] - at,
        formed_s=(points[leader].parent / "spec.json").stat().st_mtime - at,
        claim_s=point["claim_s"],
        verify_s=point["verify_s"],
        announced_s=points[leader].stat().st_mtime - at,
        point_s=max(path.stat().st_mtime for path in points.values()) - at,
        wall_s=max(each["at"] for each in resumed.values()) - at,
        leader=used[leader],
        others={name: median(each[name] for each in others) for name in COUNTED},
        most={name: max(each[name] for each in others) for name in COUNTED},
        leader_busy_s=resumed[leader]["cpu_s"] - noticed["cpu_s"],
        server_cpu_s=server_cpu_s - server_before,
        server_busy_s=server_cpu_s - noticed["server_cpu_s"],
        attempts=point["attempt"] - attempt,
        memory_mb=memory_mb,
    )


def _await_resumed(
    simulated: SimulatedNodes, *, after: int, within_s: float, failures: list[Message] | None = None
) -> dict[int, Message]:
    """Return the first events of all living nodes' attempt that is later than `after`, and collect `failures`."""
    found: dict[int, Message] = {}

    def done(message: Message) -> bool:
        if message["event"] == "failure" and failures is not None:
            failures.append({**message, "server_cpu_s": _processor_s(simulated.server_pid)})
        if message["event"] == "attempt" and message["attempt"] > after:
            found[message["node"]] = message
        return set(found) >= set(simulated.alive) and len({found[each]["attempt"] for each in simulated.alive}) == 1

    simulated.until(done, within_s=within_s, what=f"an attempt of {len(simulated.alive)} nodes after attempt {after}")
    return {number: found[number] for number in simulated.alive}


def _idle(simulated: SimulatedNodes, *, leader: int) -> dict[str, float]:
    """Return the median resource use per second of a follower."""
    before = simulated.counts()
    simulated.listen(_IDLE_S)
    after = simulated.counts()
    rates = []
    for number in simulated.alive:
        seconds = after[number]["at"] - before[number]["at"]
        used = _less(after[number], before[number])
        if number != leader:
            rates.append({name: used[name] / seconds for name in COUNTED})
    return {name: median(each[name] for each in rates) for name in COUNTED}


def _leader(resumed: Mapping[int, Message]) -> int:
    (found,) = (number for number, message in resumed.items() if "leader" not in message)
    return found


def _victims(simulated: SimulatedNodes, scenario: str, leader: int) -> Sequence[int]:
    if scenario == LEADER:
        return [leader]
    return [number for number in simulated.alive if number != leader][: KILLED[scenario]]


def _less(after: Message, before: Message) -> dict[str, float]:
    return {name: after[name] - before[name] for name in COUNTED}


def _point_of(home: Path, number: int) -> Path:
    """Return the newest resume point of a node."""
    found = (home / "local" / f"node-{number:03d}").glob("*/launch-*/resume.json")
    return max(found, key=lambda path: path.stat().st_mtime)


def _processor_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
