"""Ranks that are not data-parallel are refused by name, before they train on rows twice or resume with another stage."""

import json
from pathlib import Path

from tests.conftest import PROGRAMS
from tests.engine_ranks import run_program

REFUSED = {
    "other weights": "rank 1 has other weights than rank 0 in 'model.0.weight' after a step",
    "stages": "rank 1 has 'model.stage1.0.weight', which the first rank has not",
    "other shapes": "rank 1 has 2 parameters, and the first rank other ones",
    "half of the ranks": "sharded over all 2 ranks, found 'model.0.weight'",
    "stages in a mesh": "expected launch.mesh.pp = 2 for the script",
    "one name at two stages": "expected '0.bias' to be one tensor, found other values of it at the stages 0 and 1",
    "shards in TorchState": "in dlac.TorchState, found 'model.0.weight', of which each rank has a part",
    "tensor parallel": "expected launch.mesh.tp = 2 for the script, whose DeviceMesh has 'tp' of 2 ranks",
}


def test_other_parallelism_is_refused(tmp_path: Path) -> None:
    """Stages, split layers and ranks with own weights are named by both ranks. DDP, FSDP2, HSDP and specified splits train."""
    results = run_program(
        2, str(PROGRAMS / "parallel_models.py"), OUT=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[2])
    )
    assert results.codes == [0, 0], results.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    accepted = {"replicas", "shards", "groups of shards", "tensor parallel in the spec"}
    assert {kind for kind, verdict in first.items() if not verdict} == accepted
    for kind, reason in REFUSED.items():
        assert reason in first[kind]
        assert any(
            way in first[kind] for way in ("data parallelism alone", "in the whole model", "use dlac.DistributedState")
        )
