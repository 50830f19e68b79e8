"""Commands of kept checkpoints: `dlac checkpoint list`, `tag`, `untag` and `verify`."""

from dataclasses import asdict
from secrets import token_hex
from typing import Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.audit.wording import format_age, format_bytes
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import SpecInvalid

_HOLDS = ("fork:", "export:")
"""Beginnings of the names by which DLAC itself holds checkpoints."""
_NAME_CHARACTERS = 200


def check_checkpoint_name(name: str) -> str:
    """Return a name for a checkpoint. Raises `SpecInvalid` if it is blank, cannot be printed, or is one of DLAC's own."""
    if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > _NAME_CHARACTERS:
        raise SpecInvalid(
            f"expected a tag of 1-{_NAME_CHARACTERS} characters that can be printed, without space around it, found {name!r}: "
            "choose such a tag"
        )
    if name.casefold().startswith(_HOLDS):
        raise SpecInvalid(
            f"expected a tag that begins with none of {list(_HOLDS)!r}, found {name!r}: DLAC keeps checkpoints by such tags "
            "while it forks and exports, choose another"
        )
    return name


@ui.extension_command("dlac checkpoint list my-run", "dlac checkpoint list my-run --json")
def show_checkpoints(
    run: ui.RunName, home: ui.Home = None, spec: ui.SpecOption = None, as_json: ui.AsJson = False
) -> None:
    """List the checkpoints of a run: step, age, size, and state (kept, left by a rewind, retired or damaged)."""
    from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints

    listed = list_checkpoints(ui.lakehouse_of(spec, home), run)
    if as_json:
        ui.show_json([asdict(each) for each in listed])
        return
    names = ("step", "state", "committed", "size", "attempt", "tiers", "verified", "checkpoint", "tags")
    rows = []
    for each in listed:
        facts = (each.state, format_age(each.committed_at), format_bytes(each.bytes), f"{each.attempt:,}")
        kept = (" ".join(each.tiers), format_age(each.verified_at), each.checkpoint_id, ", ".join(each.names))
        rows.append((f"{each.step:,}", *facts, *kept))
    ui.show_table(names, rows, right=("step", "size", "attempt"), empty=f"run {run} has no checkpoint yet")


@ui.extension_command("dlac checkpoint tag my-run best", "dlac checkpoint tag my-run best --step 400")
def tag(
    run: ui.RunName,
    name: Annotated[str, Argument(help="Name of the tag.", callback=check_checkpoint_name)],
    step: ui.Step = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
) -> None:
    """Tag a checkpoint. Retention keeps it until the tag is removed, with any job spec."""
    from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint

    checkpoint_id = name_checkpoint(ui.ledger_of(spec, home), run, name, step=step)
    ui.show_text(f"checkpoint {checkpoint_id} is tagged {name}")


@ui.extension_command("dlac checkpoint untag my-run best")
def untag(
    run: ui.RunName,
    name: Annotated[str, Argument(help="Name of the tag.")],
    home: ui.Home = None,
    spec: ui.SpecOption = None,
) -> None:
    """Remove a tag from a checkpoint. Retention then treats the checkpoint as any other."""
    from dlac_pipeline.extensions.kept_checkpoints.tags import unname_checkpoint

    checkpoint_id = unname_checkpoint(ui.ledger_of(spec, home), run, name)
    ui.show_text(f"checkpoint {checkpoint_id} is not tagged {name} any more")


@ui.extension_command("dlac checkpoint verify my-run", "dlac checkpoint verify my-run --step 400")
def verify(
    run: ui.RunName,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    step: Annotated[int | None, Option(help="Only the checkpoint of this step. Unset: all kept checkpoints.")] = None,
) -> None:
    """Read the files of a run's checkpoints again and compare their digests. Exit status 0 only if all match.

    The ledger records the result. `dlac checkpoint list` shows when each checkpoint last matched.
    """
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.extensions.kept_checkpoints.listing import record_verified, verify_checkpoints

    problems: dict[str, str | None] = {}
    ledger = ui.ledger_of(spec, home)
    job = ui.known_spec(ledger.lakehouse, run, spec, home)
    files = None if job is None else tiers_of(job).files  # else the addresses in the lakehouse suffice
    with ui.steps_bar() as bar:
        task = bar.add_task("reading checkpoints", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        verdicts = verify_checkpoints(ledger.lakehouse, run, step, files=files, progress=show)
        try:
            for verdict in verdicts:
                problems[verdict.checkpoint.checkpoint_id] = verdict.problem
                ui.show_text(f"step {verdict.checkpoint.step}: {verdict.problem or 'whole'}")
        finally:  # verdicts before an outage of the store are recorded
            if problems:
                record_verified(ledger, run, problems, verification=token_hex(8))
    if any(problems.values()):
        raise typer.Exit(1)
