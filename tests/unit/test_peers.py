"""The loaders that are compared: each has a module, and an environment that any index can make."""

import re
from pathlib import Path

import pytest

from benchmarks import peer_loaders
from benchmarks.peer_loaders.environments import Environment
from benchmarks.peers import ENVIRONMENTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_peer_has_module(name: str) -> None:
    """The loader of a name is a module of this name."""
    assert Path(peer_loaders.__file__).with_name(f"{name}.py").is_file()


@pytest.mark.parametrize("environment", sorted({each for each in ENVIRONMENTS.values() if each.requirements}, key=str))
def test_requirements_are_pinned(environment: Environment) -> None:
    """Every line is a name and a version: no index, no address, no build of this machine."""
    comment, *lines = (ROOT / environment.requirements).read_text().splitlines()
    assert comment.startswith("# What benchmarks/peers.py")
    assert environment.folder in comment
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
