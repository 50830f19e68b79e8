"""Branches: going back, beginning a run from another one, letting go of what was left."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.errors import NoSuchRun, SpecInvalid
from dlac_pipeline.commands.shared import (
    OUT,
    AsJson,
    Home,
    RunName,
    SpecOption,
    lakehouse_of,
    resolved,
    show_facts,
    spec_of_run,
)
from dlac_pipeline.spec import JobSpec, parse_spec

if TYPE_CHECKING:
    from catalog.connect import Lakehouse

app = typer.Typer()
CheckpointId = Annotated[
    str | None, typer.Option("--checkpoint", help="Its id instead, where a run came by the step on several branches.")
]


@app.command()
def rewind(
    run: RunName,
    to_step: Annotated[int | None, typer.Option(help="The step of the checkpoint to go back to.")] = None,
    checkpoint: CheckpointId = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows that the new branch leaves out, e.g. \"doc_id < 900 and lang = 'xx'\"; may be repeated."
        ),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Whose rows these are, in a mixture.")] = None,
    why: Annotated[str, typer.Option(help="The reason, for whoever reads the ledger later.")] = "",
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Go back to a checkpoint: a new branch begins there, the old one stays auditable, and a launch that is alive is fenced off.

    A finished run is open again. What is excluded stays so on this branch, whatever the job spec says.
    """
    from dlac_pipeline.recover.coordinator import new_nonce
    from dlac_pipeline.recover.rewind import rewind_run

    if (to_step is None) == (checkpoint is None):
        raise SpecInvalid(
            f"expected --to-step or --checkpoint, found {to_step!r} and {checkpoint!r}: name one checkpoint"
        )
    lakehouse = lakehouse_of(spec, home)
    done = rewind_run(
        lakehouse,
        run,
        nonce=new_nonce(),
        step=to_step,
        checkpoint_id=checkpoint,
        exclude=exclude or (),
        source=source,
        why=why,
        spec=_known_spec(lakehouse, run, spec, home),
    )
    if as_json:
        show_facts(asdict(done), as_json=True)
        return
    OUT.print(
        f"run {run} goes on behind checkpoint {done.checkpoint_id} (step {done.step}); left behind is {done.left} (step "
        f"{done.left_step}). Attempts before {done.attempt} are fenced off: start it again with `dlac recover {run}`",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def fork(
    run: RunName,
    new: Annotated[str, typer.Option("--as", help="Name of the run that begins.")],
    spec: Annotated[Path, typer.Option("--spec", help="Its job spec; the run that it names does not count.")],
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint; unset: the head.")] = None,
    checkpoint: CheckpointId = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Begin a run from a checkpoint of another one, which may be training: it has seen what that has seen.

    Model, optimizer and generators are the parent's; data order, tables and everything else are those of the job spec.
    """
    from catalog.connect import connect
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.recover.fork import fork as fork_run

    if step is not None and checkpoint is not None:
        raise SpecInvalid(f"expected --step or --checkpoint, found {step!r} and {checkpoint!r}: name one checkpoint")
    read = resolved(spec, home)
    job = parse_spec({**read.model_dump(), "run": new}, origin=repr(str(spec)))
    lakehouse = connect(job.lakehouse)
    parent = _known_spec(lakehouse, run, None, home)
    done = fork_run(
        lakehouse,
        job,
        run,
        step=step,
        checkpoint_id=checkpoint,
        files=None if parent is None else tiers_of(parent).files,
    )
    if as_json:
        show_facts(asdict(done), as_json=True)
        return
    OUT.print(
        f"run {new} begins with checkpoint {done.checkpoint_id}, forked from {done.parent_checkpoint} (step "
        f"{done.parent_step} of run {run})",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def retire(
    run: RunName,
    checkpoint: Annotated[
        str | None, typer.Option(help="Id or step of one that is left; unset: all that are left and have no name.")
    ] = None,
    home: Home = None,
    spec: SpecOption = None,
) -> None:
    """Let go of checkpoints that rewinds have left behind: nobody can go back to them, and their files are removed.

    What they have consumed stays in the ledger. On the surviving lineage checkpoint.keep_last says what is kept.
    """
    from catalog.branches import retire_left
    from catalog.ledger import Ledger
    from dlac_pipeline.checkpoint.retention import Retention
    from dlac_pipeline.checkpoint.store import tiers_of

    lakehouse = lakehouse_of(spec, home)
    job = spec_of_run(run, spec, home, lakehouse=lakehouse)
    ledger = Ledger(lakehouse)
    gone = retire_left(ledger, run, checkpoint)
    Retention(job.checkpoint, tiers_of(job), 0, ledger.head_rows(run)).sweep()
    for row in gone:
        OUT.print(f"retired {row['checkpoint_id']} (step {row['step']})", markup=False)
    if not gone:
        OUT.print(f"run {run} has no checkpoint that is left behind and has no name", markup=False)


def _known_spec(lakehouse: Lakehouse, run: str, spec: Path | None, home: Path | None) -> JobSpec | None:
    """The run's spec; None for one that was launched from another machine."""
    with suppress(NoSuchRun):
        return spec_of_run(run, spec, home, lakehouse=lakehouse)
    return None
