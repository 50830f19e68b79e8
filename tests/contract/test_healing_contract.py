"""The door of ways of healing: replica groups, and the way of another author that a folder brings, keep one contract."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks.processes import Processes
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE
from dlac_pipeline.extensions.replicas.lighthouse import Lighthouse
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.ranks.healing import Healing, healing_of
from dlac_pipeline.supervise.ranks.rank_starter import RankStart, RankStarter
from tests.conftest import PROGRAMS
from tests.installed import install_distribution

RANKS = 3
_NO_PROCESS = 2**31 - 1
"""A process id that the kernel gives to none."""


class Starts(RankStart):
    """The start of ranks that have no processes. `live` has the running ones."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        super().__init__(RankStarter(), spec, folder, Share(world_size=RANKS, ranks=RANKS))
        self.live: dict[int, Any] = {}
        self.starts = 0

    def start_ranks(
        self, share: Share, variables: Mapping[str, str] | None = None, *, first_local_rank: int = 0
    ) -> Processes:
        """Start as many as the share says, and number them as the launcher does."""
        self.starts += share.ranks
        first = int((variables or {}).get(GROUP_VARIABLE, 0)) * share.ranks
        started = {
            share.first_rank + local: SimpleNamespace(pid=_NO_PROCESS, exitcode=None, join=lambda _: None)
            for local in range(share.ranks)
        }
        self.live.update({first + rank: process for rank, process in started.items()})
        return started  # type: ignore[return-value]  # as far as `RankProcesses` knows processes


@pytest.fixture(params=["replicas", "spares"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job spec that chooses a way of healing. The other author's is installed, and no lighthouse is started."""
    (site := tmp_path / "site").mkdir()
    source = (PROGRAMS / "spare_ranks.py").read_text()
    install_distribution(
        site, "spare-ranks", {"spare_ranks": source}, {"dlac.healing": ["spares = spare_ranks:SpareHealing"]}
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(LaunchSpec, "healing", property(lambda launch: request.param))
    monkeypatch.setattr(Lighthouse, "start", lambda lighthouse: None)
    monkeypatch.setattr(Lighthouse, "restart_dead", lambda lighthouse: "")
    ranks = {"replicas": RANKS} if request.param == "replicas" else {"world_size": RANKS}
    launch = {"script": "x", "start": "spawn", "env": {"MINE": "1", "RUST_LOG": "info"}, "preload": ["json"], **ranks}
    order = {"batch_size": 6, "key_groups": 6, "steps": 1}
    raw = {"run": "r", "source": {"table": "src.t", "columns": ["x"]}, "order": order, "launch": launch}
    return parse_spec(raw, origin="the test")


@pytest.fixture
def healing(spec: JobSpec) -> Healing:
    """The way of healing, by its name."""
    found = healing_of(spec.launch)
    assert found is not None
    return found


def test_preparation_keeps_the_job_spec(spec: JobSpec, healing: Healing) -> None:
    """The prepared job spec has further variables and modules. Those of the user stay as they are."""
    prepared = healing.prepare(spec)
    launch, expected = prepared.launch, spec.launch
    assert launch.env.items() >= expected.env.items()
    assert launch.preload[: len(expected.preload)] == expected.preload
    same = launch.model_copy(update={"env": expected.env, "preload": expected.preload})
    assert prepared.model_copy(update={"launch": same}) == spec


def test_dead_rank_is_replaced(spec: JobSpec, healing: Healing, tmp_path: Path) -> None:
    """All ranks start, and a dead one is replaced without the end of the attempt. Nothing else is started again."""
    start = Starts(healing.prepare(spec), tmp_path)
    ranks = healing.start(start)
    assert ranks.processes.pids == [_NO_PROCESS] * RANKS
    assert list(ranks.ranks) == sorted(start.live) == list(range(RANKS))
    assert list(ranks.heal()) == []
    start.live[1].exitcode = -9
    assert ranks.failures() == []
    assert [event["event"] for event in ranks.heal()] != []
    assert start.starts == RANKS + 1
    assert not ranks.all_exited()
    assert list(ranks.heal()) == []
    assert not ranks.find_rejoined()
    ranks.end()
