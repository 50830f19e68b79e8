"""Checkpoints of a model on any mesh, restored on any other one."""

import json
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS
from tests.engine_ranks import run_program


@pytest.mark.slow
def test_state_is_equal_on_every_mesh(tmp_path: Path) -> None:
    """Weights, moments and steps are equal to the last bit: 2-D shards, stages, several stages of a rank, tied embeddings."""
    results = run_program(
        4, str(PROGRAMS / "mesh_states.py"), OUT=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[2])
    )
    assert results.codes == [0] * 4, results.stderr
    assert json.loads((tmp_path / "found.json").read_text()) == []
