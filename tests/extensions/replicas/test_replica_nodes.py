"""Replica groups on several nodes, each in a network namespace. A lost node is unplugged first, so no connection closes."""

import os
import signal
from collections.abc import Iterator

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow, MembershipRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import wait_until
from tests.extensions.replicas.replica_runs import Journals, entries_of
from tests.node_network import Network, open_network
from tests.postgres_server import needs_postgres

pytest.importorskip("torchft")
pytestmark = [pytest.mark.slow, *needs_postgres]


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A network with a lakehouse."""
    with open_network(tmp_path_factory.mktemp("hosts"), monkeypatch) as opened:
        opened.arena.table()
        yield opened


def job_of_groups(network: Network, run: str, **changes: object) -> JobSpec:
    """Return a job of four ranks on two nodes, which trains until it is stopped. Each rank is a group by default."""
    launch = {"nodes": "2", "replicas": 4, "world_size": 1, "node_timeout_s": 3, "last_call_s": 1}
    meets = {"rendezvous": network.rendezvous, "gather_timeout_s": 120, "passes": 0, "steps": 100_000, "pause_s": 0.05}
    spec = network.arena.spec(run, "train_replicas.py", **{**launch, **meets, **changes})
    return spec.model_copy(update={"lakehouse": network.catalog})


def committed(network: Network, run: str, rank: int) -> int:
    """Return the last step that the newest process of a rank has committed, or 0."""
    found = [each for each in entries_of(network.arena, run) if each["rank"] == rank]
    newest = max(found, key=lambda each: each["at"], default={"pid": 0})["pid"]
    return max((each["step"] for each in found if each["pid"] == newest and each["event"] == "committed"), default=0)


@pytest.mark.parametrize("lost", ["node", "node-and-newcomer", "node-of-shards", "process", "only-process"])
def test_groups_elsewhere_train_on(network: Network, lost: str) -> None:
    """A follower or one of its processes is lost: no other process is replaced, each row is trained once, and newcomers heal."""
    run, changes = f"lose-{lost}", {}
    if lost == "node-of-shards":
        changes = {"replicas": 2, "ranks_per_replica": 2, "sharded": 1}
    elif lost == "only-process":  # of the leader's node, where the lighthouse is
        changes = {"replicas": 2}
    spec, ranks = job_of_groups(network, run, **changes), 2 if lost == "only-process" else 4
    for name in ("ra", "rb"):
        network.join(f"dlac-{name}", spec)
    wait_until(
        lambda: all(committed(network, run, rank) > 12 for rank in range(ranks)), what="all groups", within_s=120
    )
    leader = network.leader()
    victim = next(each for each in network.launches if each is not leader)
    before = max(committed(network, run, rank) for rank in range(ranks))
    if lost == "only-process":
        os.kill(network.launches[leader].of("attempt")[-1]["pids"][0], signal.SIGKILL)
    elif lost == "process":
        os.kill(network.launches[victim].of("attempt")[-1]["pids"][1], signal.SIGKILL)
    else:
        network.lose(victim)
        spare = network.join("dlac-rc", spec)
        if lost == "node-and-newcomer":
            wait_until(lambda: network.launches[spare].of("attempt") != [], what="the newcomer", within_s=120)
            network.lose(spare)
            network.join("dlac-rd", spec)
    newcomer = 0 if lost == "only-process" else 3

    def trains() -> bool:
        pids = Journals(entries_of(network.arena, run)).processes.get(newcomer, set())
        return len(pids) > 1 and committed(network, run, newcomer) > before

    wait_until(trains, what=f"a new process of rank {newcomer}", within_s=120)
    network.launches[leader].process.send_signal(signal.SIGTERM)
    network.check_finished()
    journals = Journals(entries_of(network.arena, run))
    replaced = {rank for rank, pids in journals.processes.items() if len(pids) > 1}
    assert replaced == {"process": {3}, "only-process": {0}}.get(lost, {2, 3})
    assert audit_run(network.arena.lakehouse, run).exact
    assert [row.attempt for row in network.arena.rows(run, ClaimRow)] == [1]
    assert {row.outcome for row in recoveries_of(network.arena.lakehouse, run)} == {"rejoined"}
    groups = [tuple(row.groups) for row in network.arena.rows(run, MembershipRow)]
    assert groups[0] == groups[-1] == tuple(range(spec.launch.replicas))
    trained, recorded, last = journals.journal, network.arena.recorded(run), 0
    for checkpoint in network.arena.lineage(run):
        steps = range(last + 1, checkpoint.step + 1)
        assert recorded[checkpoint.step] == sorted(row for step in steps for row in trained[step])
        last = checkpoint.step
