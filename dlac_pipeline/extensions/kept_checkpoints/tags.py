"""Tags of checkpoints, which keep them from retention: names in the ledger."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.commits import beside, names_of
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.run_rows import no_such_run, restorable


def name_checkpoint(
    ledger: Ledger, run: str, name: str, *, step: int | None = None, checkpoint_id: str | None = None
) -> str:
    """Name the checkpoint of a step or with an id, or the head. Retention keeps it while it has a name. Return its id.

    Raises `NoSuchRun`, `NoSuchCheckpoint` if none can be restored, or `SpecInvalid` if another checkpoint has the name.
    """
    named = ""

    def decide(state: RunState) -> Append | None:
        nonlocal named
        if not state.exists:
            raise no_such_run(run, ledger.runs())
        rows = ledger.rows_at(state, kinds=typed_rows.HEAD_KINDS)
        named = restorable(run, rows, step, checkpoint_id=checkpoint_id).checkpoint_id
        holder = names_of(rows).get(name)
        if holder == named:
            return None
        if holder is not None:
            raise errors.SpecInvalid(
                f"expected {name!r} to tag no checkpoint of run {run!r}, found it tags {holder!r}: choose another tag, or "
                "remove this one with `dlac checkpoint untag`"
            )
        return beside(state, [typed_rows.NameRow(checkpoint_id=named, name=name)])

    ledger.append(run, decide)
    return named


def unname_checkpoint(ledger: Ledger, run: str, name: str) -> str:
    """Remove a name. Return the id of the checkpoint that had it. Raises `NoSuchRun` or `NoSuchCheckpoint`."""
    removed = ""

    def decide(state: RunState) -> Append | None:
        nonlocal removed
        if not state.exists:
            raise no_such_run(run, ledger.runs())
        names = names_of(ledger.rows_at(state, kinds=(typed_rows.NameRow,)))
        if name not in names:
            if removed:
                return None  # an earlier try has landed
            raise errors.NoSuchCheckpoint(
                f"expected a checkpoint of run {run!r} with tag {name!r}, found the tags {sorted(names)!r}"
            )
        removed = names[name]
        return beside(state, [typed_rows.NameRow(name=name)])

    ledger.append(run, decide)
    return removed


@contextmanager
def keep_checkpoint(
    ledger: Ledger, run: str, name: str, *, step: int | None = None, checkpoint_id: str | None = None
) -> Iterator[typed_rows.CheckpointRow]:
    """Keep a checkpoint, or the head, from the retention of its run, which may be training. Yield its row.

    A process that is killed inside leaves the name, and so the checkpoint, until `name` is used again or removed.
    Raises `NoSuchRun`, or `NoSuchCheckpoint` for one that does not exist or was retired or found damaged since then.
    """
    target = ledger.restorable(run, step, checkpoint_id=checkpoint_id).checkpoint_id
    if names_of(ledger.rows(run, kinds=(typed_rows.NameRow,))).get(name, target) != target:
        unname_checkpoint(ledger, run, name)  # of one that was killed
    named = name_checkpoint(ledger, run, name, step=step, checkpoint_id=checkpoint_id)  # the head as it is now
    try:
        yield ledger.restorable(run, checkpoint_id=named)
    finally:
        with suppress(errors.NoSuchCheckpoint):  # an operator took it away
            unname_checkpoint(ledger, run, name)
