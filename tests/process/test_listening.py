"""A run on one node opens no port that another node reaches."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

import psutil
import pytest

from tests.conftest import Arena, Launch, wait_until
from tests.ports import own_port


def listening(launch: Launch) -> Iterator[tuple[str, int]]:
    """Yield the addresses at which processes of a launch listen."""
    with suppress(psutil.Error):
        root = psutil.Process(launch.process.pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                for each in process.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN or (each.type.name == "SOCK_DGRAM" and not each.raddr):
                        yield each.laddr.ip, each.laddr.port


@pytest.mark.parametrize(
    ("env", "start"),
    [
        ({}, "fork"),
        pytest.param({}, "spawn", marks=pytest.mark.soak),
        pytest.param({"OWN_GROUP": "1"}, "fork", marks=pytest.mark.soak),
        pytest.param({"OWN_GROUP": "1"}, "spawn", marks=pytest.mark.soak),
    ],
)
def test_run_listens_on_loopback(arena: Arena, env: dict[str, str], start: str) -> None:
    """The ranks' store and connections are on loopback, even if the script makes the process group."""
    arena.table()
    launch = arena.launch(arena.spec("r", pause_s=0.5, start=start, env=env))
    wait_until(lambda: bool(launch.of("step")), what="a step")
    found = set(listening(launch))
    launch.destroy()
    assert found
    assert all(ip_address(address).is_loopback for address, _ in found), found


JOINS = """
import json, psutil
import torch, torch.distributed as dist
from dlac_pipeline.elastic.ranks.process_group import join

join()
dist.all_reduce(torch.ones(1))
found = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
dist.barrier()
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_unsupervised_group_listens_at_master() -> None:
    """Ranks of another launcher listen at MASTER_ADDR only."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    command = [sys.executable, "-c", JOINS]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    assert all(found)
    assert {ip_address(each).is_loopback for addresses in found for each in addresses} == {True}
