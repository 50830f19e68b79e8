"""Checkpoints from and for other programs: adopt, export, identify."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dlac_pipeline.cli import shared as ui

app = typer.Typer()


@ui.command(
    app, ui.BRANCH, "dlac adopt job.toml /old/checkpoints", "dlac adopt job.toml /old/checkpoints --tag global_step400"
)
def adopt(
    spec: ui.SpecFile,
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a checkpoint of DeepSpeed or torch.distributed.checkpoint.", exists=True),
    ],
    tag: Annotated[str | None, typer.Option(help="DeepSpeed's tag. Unset: the tag in its file `latest`.")] = None,
    home: ui.Home = None,
) -> None:
    """Begin the spec's run from a checkpoint that DLAC did not write. Its consumption stays unknown.

    DCP's own index is a pickle, which can run code. Adopt only checkpoints that you trust.
    """
    from dlac_pipeline.checkpoint.restore.foreign import foreign_checkpoint
    from dlac_pipeline.lakehouse.iceberg.connect import connect
    from dlac_pipeline.operations.adopt import adopt_checkpoint

    job = ui.resolved(spec, home)
    found = foreign_checkpoint(folder, tag=tag)
    checkpoint_id = adopt_checkpoint(connect(job.lakehouse), job, found)
    ui.show_text(f"run {job.run} begins with checkpoint {checkpoint_id}, adopted from {found.origin}")


@ui.command(
    app, ui.CHECKPOINTS, "dlac export my-run weights.safetensors", "dlac export my-run weights.safetensors --step 400"
)
def export(
    run: ui.RunName,
    out: Annotated[Path, typer.Argument(help="File to write, such as weights.safetensors.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Unset: the head.")] = None,
    part: Annotated[
        str, typer.Option(help="Part of the state that has the weights, by its name in the script.")
    ] = "model",
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Write a checkpoint's weights as safetensors. `dlac identify` finds the checkpoint by the digest of the file."""
    from dlac_pipeline.checkpoint.restore.export import export_weights
    from dlac_pipeline.checkpoint.store import tiers_of

    lakehouse = ui.lakehouse_of(spec, home)
    job = ui.spec_of_run(run, spec, home, lakehouse=lakehouse)
    ui.show_facts(asdict(export_weights(lakehouse, tiers_of(job), out, step=step, part=part)), as_json=as_json)


@app.command("whose", hidden=True)  # the name of version 0.1
@ui.command(app, ui.CHECKPOINTS, "dlac identify weights.safetensors")
def identify(
    file: Annotated[
        Path,
        typer.Argument(help="File that `dlac export` wrote, or a copy of it.", exists=True, dir_okay=False),
    ],
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Identify the checkpoint of a file of weights, by its digest. `dlac sql` shows what it has consumed."""
    from dlac_pipeline.checkpoint.restore.export import checkpoint_of_file

    ui.show_facts(checkpoint_of_file(ui.lakehouse_of(spec, home), file), as_json=as_json)
