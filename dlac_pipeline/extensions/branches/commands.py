"""Commands of branches: `dlac rewind` and `dlac checkpoint retire`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import SpecInvalid

if TYPE_CHECKING:
    from dlac_pipeline.extensions.branches.appends import Rewound

PANEL = "Recover"


@ui.extension_command(
    "dlac rewind my-run --to-step 400",
    'dlac rewind my-run --to-step 400 --exclude "lang = \'xx\'" --why "wrong language"',
)
def rewind(
    run: ui.RunName,
    to_step: Annotated[int | None, Option(help="Step of the checkpoint to go back to. 0: the beginning.")] = None,
    checkpoint: ui.CheckpointId = None,
    exclude: Annotated[
        list[str] | None,
        Option(
            help="Rows that the new branch excludes, e.g. \"doc_id < 900 and lang = 'xx'\". The option can be repeated."
        ),
    ] = None,
    source: Annotated[str | None, Option(help="Source of these rows, in a mixture.")] = None,
    why: Annotated[str, Option(help="Reason to record in the ledger.")] = "",
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Go back to a checkpoint on a new branch. The old branch stays auditable, and a live launch is fenced off.

    A finished run is open again. Exclusions stay in force on this branch, even if the job spec does not have them.
    """
    from dlac_pipeline.extensions.branches.rewind import rewind_run
    from dlac_pipeline.lakehouse.ledger.commits import new_nonce

    target = checkpoint if to_step is None else to_step
    if target is None or None not in (to_step, checkpoint):
        raise SpecInvalid(
            f"expected --to-step or --checkpoint, found {to_step!r} and {checkpoint!r}: name one checkpoint"
        )
    if source is not None and not exclude:
        raise SpecInvalid(
            f"expected --source with --exclude only, found {source!r}: name the rows to exclude, or leave it out"
        )
    lakehouse = ui.lakehouse_of(spec, home)
    done = rewind_run(
        lakehouse,
        run,
        nonce=new_nonce(),
        target=target,
        exclude=[where if source is None else (source, where) for where in exclude or ()],
        why=why,
        spec=ui.known_spec(lakehouse, run, spec, home),
    )
    if as_json:
        ui.show_json(asdict(done))
    else:
        _show_rewound(run, done, exclude or (), source)


@ui.extension_command("dlac checkpoint retire my-run", "dlac checkpoint retire my-run --checkpoint 400")
def retire(
    run: ui.RunName,
    checkpoint: Annotated[
        str | None, Option(help="Id or step of an abandoned checkpoint. Unset: all of them that have no tag.")
    ] = None,
    whole_run: Annotated[
        bool, Option("--whole-run", help="Also those of the surviving lineage: the run cannot be resumed afterwards.")
    ] = False,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
) -> None:
    """Retire checkpoints that rewinds have abandoned. They cannot be restored afterwards, and their files are removed.

    Their consumption stays in the ledger. On the surviving lineage checkpoint.keep_last decides which ones are kept.
    """
    from dlac_pipeline.extensions.branches.retire import retire_checkpoints

    lakehouse = ui.lakehouse_of(spec, home)
    job = ui.spec_of_run(run, spec, home, lakehouse=lakehouse)
    gone = retire_checkpoints(lakehouse, run, job, checkpoint, whole=whole_run)
    for row in gone:
        ui.show_text(f"retired {row.checkpoint_id} (step {row.step})")
    if not gone:
        ui.show_text(f"run {run} has no abandoned checkpoint without a tag")


def _show_rewound(run: str, done: "Rewound", exclude: Sequence[str], source: str | None) -> None:
    """Print where the new branch begins, how many excluded rows it was trained on, and how to rewind to before them."""
    checkpoint = f"checkpoint {done.checkpoint_id}"
    where = "begins again" if done.checkpoint_id is None else f"resumes after {checkpoint}"
    head = f"Its head was {done.left} (step {done.left_step}), on the branch that it leaves"
    ui.show_text(
        f"run {run} {where} (step {done.step}). {head if done.left else 'It had no checkpoint that can be restored'}. "
        f"Attempts before {done.attempt} are fenced off: start it again with `dlac recover {run}`"
    )
    if done.not_counted:
        ui.show_text(f"how many excluded rows {checkpoint} has seen could not be counted: {done.not_counted}")
    if not done.excluded_rows_seen:
        return
    words = [word for where in exclude for word in ("--exclude", where)] + (["--source", source] if source else [])
    again = f"dlac rewind {run} --to-step {done.clean_step} {shlex.join(words)}"
    if done.clean_step is None:
        advice = (
            "no earlier checkpoint that is kept has seen none of them, and the run began with a checkpoint: begin a run under "
            f"another name with exclude = {json.dumps(list(exclude))}"
        )
    elif done.clean_checkpoint is None:
        advice = f"no earlier checkpoint that is kept has seen none of them: begin the run again with {again}"
    else:
        advice = f"checkpoint {done.clean_checkpoint} (step {done.clean_step}) has seen none of them: {again}"
    ui.show_text(f"{checkpoint} was trained on {done.excluded_rows_seen} of the excluded rows; {advice}")
