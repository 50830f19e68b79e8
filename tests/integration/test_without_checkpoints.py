"""Commands report an outcome, not an error, for runs that exist and have no checkpoint."""

import pytest

from dlac_pipeline.dagster.assets.checks import verify_head
from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.lakehouse.errors import NoRestorableCheckpoint
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, quarantine
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import Arena

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other


def test_run_waiting_for_batch_passes_checks(arena: Arena) -> None:
    """What was appended is less than a batch: nothing was consumed, and there is nothing that could not be restored."""
    arena.table(appends=(20,))
    spec = arena.spec("waits", follow="appends", world_size=1)
    assert arena.train(spec) == {}
    assert not arena.rows(spec.run, CheckpointRow)
    assert verify_head(arena.lakehouse, spec.run, None) is None
    assert model_page(arena.lakehouse, spec.run)["head_checkpoint"] == "(none)"


def test_run_of_damaged_checkpoints_fails_check(arena: Arena) -> None:
    """That is another thing than none yet."""
    arena.table()
    spec = arena.trained("broken", world_size=1, until=15)
    ledger, (only,) = Ledger(arena.lakehouse), arena.lineage(spec.run)
    attempt = Attempt(run=spec.run, number=claim(ledger, spec.run, nonce="n", replaces=1).fence.attempt, nonce="n")
    quarantine(ledger, attempt, damaged={only.checkpoint_id: "a flipped bit"}, head_after=None)
    with pytest.raises(NoRestorableCheckpoint, match="all damaged or abandoned"):
        verify_head(arena.lakehouse, spec.run, None)
