"""A run that follows a table which grows and is compacted, by two processes. One is killed."""

import os
import signal
from itertools import chain
from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from tests.conftest import Arena
from tests.integration.test_legs import append, rewrite


@pytest.mark.slow
def test_appends_outlive_compaction_and_kill(arena: Arena) -> None:
    """One rank trains the first rows. Two ranks train what comes next, and a rank dies. Each row is consumed once."""
    arena.table(appends=(160, 160), row_group_rows=20)
    changes: dict[str, Any] = {"follow": "appends", "identity_columns": ["row_id"], "passes": 1, "every_steps": 3}
    launch = arena.launched(arena.spec("r", world_size=1, **changes))
    append(arena, 320, 160)
    rewrite(arena)
    append(arena, 480, 160)
    launch = arena.launch(arena.spec("r", pause_s=0.1, **changes), repin=True)
    launch.wait_for("checkpoint")
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    assert launch.wait() == 0, launch.stderr
    assert len(launch.of("attempt")) == 2
    sizes = [row.world_size for row in arena.lineage("r")]
    assert (sizes[0], sizes[-1]) == (1, 2)
    assert sorted(chain(*arena.recorded("r").values())) == list(range(640))
    assert audit_run(arena.lakehouse, "r").exact
