"""Ranks that are not data-parallel are refused by name, before they train on rows twice or resume with another stage."""

import json
from pathlib import Path

from tests.conftest import PROGRAMS
from tests.engine_ranks import run_program

REFUSED = {
    "other weights": "rank 1 has other weights than rank 0 in 'model.0.weight' after a step",
    "stages": "rank 1 has 'model.stage1.0.weight', which rank 0 has not",
    "other shapes": "rank 1 has 2 parameters, and rank 0 other ones",
    "half of the ranks": "sharded over all 2 ranks, found 'model.0.weight'",
    "stages in a mesh": "DeviceMesh whose dimensions are data-parallel, found",
    "tensor parallel": "found 'tp' of 2 ranks",
}


def test_other_parallelism_is_refused(tmp_path: Path) -> None:
    """Stages, split layers and ranks with weights of their own are named, with what to do, by both ranks.

    DDP, FSDP2 and HSDP train, also if rank 0 alone has a further part.
    """
    results = run_program(
        2, str(PROGRAMS / "parallel_models.py"), OUT=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[2])
    )
    assert results.codes == [0, 0], results.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert {kind for kind, verdict in first.items() if not verdict} == {"replicas", "shards", "groups of shards"}
    for kind, reason in REFUSED.items():
        assert reason in first[kind]
        assert "train with data parallelism alone" in first[kind]
