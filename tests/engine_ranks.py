"""Ranks of tests/programs/engine_state.py: they train, save and load a tiny model with an engine, without a run."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.forked import Forked
from tests.ports import own_port

PROGRAM = Path(__file__).parent / "programs" / "engine_state.py"
STEPS = 3
"""Steps before the checkpoint."""


@dataclass
class RankResults:
    """The exit statuses of the ranks, and the state that rank 0 wrote."""

    codes: list[int]
    stderr: list[str]
    """Standard error, by rank."""
    state: dict[str, Any] = field(default_factory=dict)


def run_ranks(count: int, dump: Path, **request: Any) -> RankResults:
    """Run the program with `count` ranks to its end."""
    path = os.pathsep.join([str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")])
    text = json.dumps({"dump": str(dump), **request}, default=str)
    results = run_program(count, str(PROGRAM), REQUEST=text, PYTHONPATH=path)
    if not any(results.codes):
        results.state = torch.load(dump, weights_only=False)
    return results


def run_program(count: int, *command: str, **environment: str) -> RankResults:
    """Run a program of Python with `count` ranks to its end."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    common |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}
    output: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    variables = [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    with ExitStack() as stack:
        ranks = [stack.enter_context(Forked([sys.executable, *command], env=each, **output)) for each in variables]
        for rank in ranks:
            stack.callback(rank.kill)
        stderr = [rank.communicate(timeout=240)[1] for rank in ranks]
    return RankResults(codes=[rank.returncode for rank in ranks], stderr=stderr)


@dataclass
class Saved:
    """A checkpoint of an engine, and the saved state."""

    folder: Path
    world_size: int
    request: dict[str, Any]
    state: dict[str, Any]
    stderr: list[str]
    """Standard error of the ranks that saved it."""

    def load(self, world_size: int) -> RankResults:
        """Load it with `world_size` ranks."""
        dump = self.folder.parent / f"loaded-{world_size}.pt"
        saved = {"folder": self.folder, "saved_world_size": self.world_size, "after": STEPS}
        return run_ranks(world_size, dump, do="load", **saved, **self.request)


def save(home: Path, world_size: int, *, writer: str = "direct", **request: Any) -> Saved:
    """Train `STEPS` steps, save, and continue training."""
    folder = home / "attempt-0001" / "step-000000003-abcd"
    results = run_ranks(world_size, home / "saved.pt", do="save", folder=folder, steps=STEPS, writer=writer, **request)
    assert not any(results.codes), results.stderr
    return Saved(folder, world_size, request, results.state, results.stderr)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that everything but the losses is equal, bit for bit."""
    assert found.keys() == expected.keys()
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(found["tensors"][name], tensor), name
    for name in expected.keys() - {"tensors", "losses"}:
        assert str(found[name]) == str(expected[name]), name
