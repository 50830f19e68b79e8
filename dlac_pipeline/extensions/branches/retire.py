"""Retirement of checkpoints that a rewind has abandoned, and the removal of their files."""

from collections.abc import Collection

from dlac_pipeline.checkpoint.commit.retention import Retention
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger import run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.branches import checkpoint_of
from dlac_pipeline.lakehouse.ledger.commits import beside, names_of
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.run_events import RETIRED, report_command


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


def retire_left(
    ledger: Ledger, run: str, checkpoint: str | None = None, *, only: Collection[str] | None = None, whole: bool = False
) -> list[CheckpointRow]:
    """Retire abandoned checkpoints without a name: one, by id or step, or all, or the ids in `only`. Return their rows.

    `whole`: retire the surviving lineage, too, so that the run cannot be resumed. Raises `SpecInvalid`.
    """
    gone: list[CheckpointRow] = []

    def decide(state: RunState) -> Append | None:
        nonlocal gone
        rows = ledger.rows_at(state, kinds=typed_rows.HEAD_KINDS)
        found = run_rows.restorable_rows(rows)
        if gone and not any(row.checkpoint_id in found for row in gone):
            return None  # an earlier try has landed
        needed = {*(() if whole else run_rows.lineage_of(rows, state.fence.head)), *names_of(rows).values()}
        abandoned = {name: row for name, row in found.items() if name not in needed and (only is None or name in only)}
        if checkpoint is not None:
            try:
                row = checkpoint_of(run, list(abandoned.values()), checkpoint)
            except NoSuchCheckpoint as err:
                raise SpecInvalid(
                    f"expected a checkpoint of run {run!r} on an abandoned branch and without a name, found {checkpoint!r}; "
                    f"there are {sorted(abandoned)!r}: on the surviving lineage set checkpoint.keep_last, and remove a name "
                    "with `dlac checkpoint untag`"
                ) from err
            abandoned = {row.checkpoint_id: row}
        gone = list(abandoned.values())
        retire = [typed_rows.RetireRow(checkpoint_id=name) for name in abandoned]
        return beside(state, retire) if retire else None

    ledger.append(run, decide)
    return gone
