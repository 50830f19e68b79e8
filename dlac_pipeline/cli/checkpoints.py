"""The checkpoints of a run: list, name, verify, export."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer

from dlac_pipeline.audit.wording import TableColumn, format_age, format_bytes
from dlac_pipeline.cli.shared import (
    BRANCH,
    CHECKPOINTS,
    OUT,
    AsJson,
    Home,
    RunName,
    SpecFile,
    SpecOption,
    examples,
    lakehouse_of,
    resolved,
    show_facts,
    show_table,
    spec_of_run,
    steps_bar,
)
from dlac_pipeline.lakehouse.errors import NoSuchJobSpec
from dlac_pipeline.lakehouse.ledger.run_rows import check_checkpoint_name
from dlac_pipeline.lakehouse.plain_json import strict_json

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.listing import ListedCheckpoint

app = typer.Typer()


@app.command(rich_help_panel=CHECKPOINTS, epilog=examples("dlac checkpoints my-run", "dlac checkpoints my-run --json"))
def checkpoints(run: RunName, home: Home = None, spec: SpecOption = None, as_json: AsJson = False) -> None:
    """The checkpoints of a run: step, age, size, and whether they are kept, left by a rewind, retired or damaged."""
    from dlac_pipeline.checkpoint.listing import list_checkpoints

    listed = list_checkpoints(lakehouse_of(spec, home), run)
    if as_json:
        sys.stdout.write(strict_json([asdict(each) for each in listed]) + "\n")
        return
    columns = (
        TableColumn(name="step", right=True),
        TableColumn(name="state"),
        TableColumn(name="committed"),
        TableColumn(name="size", right=True),
        TableColumn(name="attempt", right=True),
        TableColumn(name="tiers"),
        TableColumn(name="verified"),
        TableColumn(name="checkpoint", long=True),
        TableColumn(name="names", long=True),
    )
    show_table(columns, [_row_of(each) for each in listed], empty=f"run {run} has no checkpoint yet")


def _row_of(listed: ListedCheckpoint) -> tuple[str, ...]:
    return (
        f"{listed.step:,}",
        listed.state,
        format_age(listed.committed_at),
        format_bytes(listed.bytes),
        f"{listed.attempt:,}",
        " ".join(listed.tiers),
        format_age(listed.verified_at),
        listed.checkpoint_id,
        ", ".join(listed.names),
    )


@app.command("name", hidden=True)  # the name of version 0.1
@app.command(rich_help_panel=CHECKPOINTS, epilog=examples("dlac tag my-run best", "dlac tag my-run best --step 400"))
def tag(
    run: RunName,
    name: Annotated[str, typer.Argument(help="The name.", callback=check_checkpoint_name)],
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint; unset: the head.")] = None,
    home: Home = None,
    spec: SpecOption = None,
) -> None:
    """Tag a checkpoint: retention keeps it until the tag is removed, whatever the job spec contains."""
    from dlac_pipeline.lakehouse.ledger.commits import name_checkpoint
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    checkpoint_id = name_checkpoint(Ledger(lakehouse_of(spec, home)), run, name, step=step)
    OUT.print(f"checkpoint {checkpoint_id} is named {name}", markup=False)


@app.command("unname", hidden=True)  # the name of version 0.1
@app.command(rich_help_panel=CHECKPOINTS, epilog=examples("dlac untag my-run best"))
def untag(
    run: RunName,
    name: Annotated[str, typer.Argument(help="The name.")],
    home: Home = None,
    spec: SpecOption = None,
) -> None:
    """Remove a tag from a checkpoint: retention then treats it as any other."""
    from dlac_pipeline.lakehouse.ledger.commits import unname_checkpoint
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    checkpoint_id = unname_checkpoint(Ledger(lakehouse_of(spec, home)), run, name)
    OUT.print(f"checkpoint {checkpoint_id} is not named {name} any more", markup=False)


@app.command(rich_help_panel=CHECKPOINTS, epilog=examples("dlac verify my-run", "dlac verify my-run --step 400"))
def verify(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    step: Annotated[
        int | None, typer.Option(help="Only the checkpoint of this step; unset: every one that is kept.")
    ] = None,
) -> None:
    """Read the files of a run's checkpoints again and compare their digests. Exit status 0 only if all match.

    The result goes into the ledger. `dlac checkpoints` shows when each was last whole.
    """
    from dlac_pipeline.checkpoint.listing import verify_checkpoints
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.lakehouse.ledger.commits import record_verified
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    problems: dict[str, str | None] = {}
    lakehouse, files = lakehouse_of(spec, home), None
    with suppress(NoSuchJobSpec):  # launched from another machine: what the lakehouse says has to do
        files = tiers_of(spec_of_run(run, spec, home, lakehouse=lakehouse)).files
    with steps_bar() as bar:
        task = bar.add_task("reading checkpoints", total=None)
        verdicts = verify_checkpoints(
            lakehouse,
            run,
            step,
            files=files,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        try:
            for verdict in verdicts:
                problems[verdict.checkpoint.checkpoint_id] = verdict.problem
                OUT.print(f"step {verdict.checkpoint.step}: {verdict.problem or 'whole'}", markup=False, soft_wrap=True)
        finally:  # a store that went away does not take back what was found before
            if problems:
                record_verified(Ledger(lakehouse), run, problems, verification=token_hex(8))
    if any(problems.values()):
        raise typer.Exit(1)


@app.command(
    rich_help_panel=BRANCH,
    epilog=examples(
        "dlac adopt job.toml /old/checkpoints", "dlac adopt job.toml /old/checkpoints --tag global_step400"
    ),
)
def adopt(
    spec: SpecFile,
    folder: Annotated[
        Path,
        typer.Argument(
            help="The checkpoint: DeepSpeed's folder, or that of torch.distributed.checkpoint.", exists=True
        ),
    ],
    tag: Annotated[str | None, typer.Option(help="DeepSpeed's tag; unset: that of its file `latest`.")] = None,
    home: Home = None,
) -> None:
    """Begin the spec's run from a checkpoint that others wrote. Its consumption stays unknown.

    DCP's own index is a pickle, which can run code: adopt only what you trust.
    """
    from dlac_pipeline.checkpoint.restore.foreign import foreign_checkpoint
    from dlac_pipeline.lakehouse.iceberg.connect import connect
    from dlac_pipeline.operations.adopt import adopt_checkpoint

    job = resolved(spec, home)
    found = foreign_checkpoint(folder, tag=tag)
    checkpoint_id = adopt_checkpoint(connect(job.lakehouse), job, found)
    OUT.print(f"run {job.run} begins with checkpoint {checkpoint_id}, adopted from {found.origin}", markup=False)


@app.command(
    rich_help_panel=CHECKPOINTS,
    epilog=examples("dlac export my-run weights.safetensors", "dlac export my-run weights.safetensors --step 400"),
)
def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(help="The file to write, such as weights.safetensors.")],
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint; unset: the head.")] = None,
    part: Annotated[str, typer.Option(help="The part that has the weights, as the script names it.")] = "model",
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as safetensors. By the file's digest `dlac identify` finds its checkpoint."""
    from dlac_pipeline.checkpoint.restore.export import export_weights
    from dlac_pipeline.checkpoint.store import tiers_of

    lakehouse = lakehouse_of(spec, home)
    job = spec_of_run(run, spec, home, lakehouse=lakehouse)
    show_facts(asdict(export_weights(lakehouse, tiers_of(job), out, step=step, part=part)), as_json=as_json)


@app.command("whose", hidden=True)  # the name of version 0.1
@app.command(rich_help_panel=CHECKPOINTS, epilog=examples("dlac identify weights.safetensors"))
def identify(
    file: Annotated[
        Path,
        typer.Argument(help="A file that `dlac export` wrote, wherever it was copied.", exists=True, dir_okay=False),
    ],
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Identify the checkpoint of a file of weights, by its digest. `dlac sql` shows what it has consumed."""
    from dlac_pipeline.checkpoint.restore.export import checkpoint_of_file

    show_facts(checkpoint_of_file(lakehouse_of(spec, home), file), as_json=as_json)
