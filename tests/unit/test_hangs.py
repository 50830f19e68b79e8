"""Which rank has been silent for too long, and whose lock says that a launch is alive."""

from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.ranks.progress import Phase, Progress
from dlac_pipeline.recover.causes import silent_rank
from dlac_pipeline.recover.run_lock import run_lock
from dlac_pipeline.recover.signs import signs_of

LAUNCH = LaunchSpec.model_validate({"script": "x", "hang_timeout_s": 10.0, "start_timeout_s": 100.0})


class Ranks:
    """Ranks that gave their last signs so many seconds ago; None: none yet."""

    def __init__(self, *signs: tuple[Phase, float] | None) -> None:
        self._signs = signs

    def progress(self) -> list[Progress | None]:
        """As a group of ranks says it."""
        now = time.time()
        return [sign and Progress(7, sign[0], now - sign[1], 0, 0.0) for sign in self._signs]


@pytest.mark.parametrize(
    ("signs", "found"),
    [
        ([(Phase.TRAINING, 1.0), (Phase.TRAINING, 11.0), (Phase.CHECKPOINT, 12.0)], 2),
        ([(Phase.TRAINING, 1.0), (Phase.TRAINING, 9.0)], None),
        ([(Phase.TRAINING, 50.0), (Phase.LOADING, 50.0)], None),
        ([(Phase.TRAINING, 50.0), None], None),
        ([(Phase.DONE, 5000.0), (Phase.DONE, 5000.0)], None),
        ([(Phase.DONE, 5000.0), (Phase.CHECKPOINT, 9.0)], None),
        ([(Phase.DONE, 5000.0), (Phase.CHECKPOINT, 11.0)], 1),
    ],
)
def test_a_rank_hangs_when_it_is_silent_and_has_something_left_to_do(
    signs: list[tuple[Phase, float] | None], found: int | None
) -> None:
    """What a script does behind its last step, an evaluation for one, gives no signs, and is no hang."""
    silent = silent_rank(Ranks(*signs), time.time() - 60.0, LAUNCH)
    assert (None if silent is None else silent.rank) == found


def test_a_claim_without_a_local_folder_is_nobody_s_launch(tmp_path: Path) -> None:
    """A rewind claims the run and launches nothing: no lock is looked for, and the run counts as not alive."""
    row = {"kind": "claim", "attempt": 2, "run": "r", "committed_at": datetime.now(UTC)}
    rewound = {**row, "detail": json.dumps({"host": socket.gethostname(), "rewinds": "r-1"})}
    signs = signs_of([rewound], 2)
    assert (signs.here, signs.held, signs.alive(lost_after_s=120.0)) == (True, False, False)
    launched = {**row, "detail": json.dumps({"host": socket.gethostname(), "local": str(tmp_path)})}
    (tmp_path / "r").mkdir()
    with run_lock(str(tmp_path), "r", wait_s=0.0, takeover=False):
        assert signs_of([launched], 2).held
