"""Retirement of checkpoints that a rewind has abandoned, and the removal of their files."""

from collections.abc import Collection

from dlac_pipeline.checkpoint.commit.retention import Retention
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.branches.appends import retire_left
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.listener_process import RETIRED, report_command


def retire_checkpoints(
    lakehouse: Lakehouse,
    run: str,
    spec: JobSpec | None,
    checkpoint: str | None = None,
    *,
    only: Collection[str] | None = None,
    whole: bool = False,
) -> list[CheckpointRow]:
    """Retire abandoned checkpoints as `retire_left` does, remove their files, and report that to the run's listeners.

    Without a spec their files remain. Raises as `retire_left`, and `LedgerOlderThanStore`.
    """
    ledger = Ledger(lakehouse)
    check_ledger(lakehouse, run)
    gone = retire_left(ledger, run, checkpoint, only=only, whole=whole)
    if spec is not None:
        Retention(spec.checkpoint, tiers_of(spec), 0, ledger.head_rows(run)).sweep()
        if gone:
            report_command(spec, {"event": RETIRED, "checkpoints": [row.checkpoint_id for row in gone]})
    return gone
