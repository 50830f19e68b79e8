"""Commands that begin a run from an existing state, and those that write or identify weights of a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name
from dlac_pipeline.spec.job_spec import parse_spec

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.store import Tiers
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

PANEL = "Recover"


@ui.extension_command(
    "dlac fork my-run --as my-run-2 --spec job.toml",
    "dlac fork my-run --as my-run-2 --spec job.toml --step 400",
)
def fork(
    run: ui.RunName,
    new: Annotated[str, Option("--as", help="Name of the new run.", callback=check_run_name)],
    spec: Annotated[Path, Option("--spec", help="Job spec of the new run. Its name of a run is ignored.")],
    step: ui.Step = None,
    checkpoint: ui.CheckpointId = None,
    home: ui.Home = None,
    as_json: ui.AsJson = False,
) -> None:
    """Begin a run from a checkpoint of another run, which may be training. The new run inherits its consumption.

    Model, optimizer and generators are the parent's. Data order, tables and all other settings are those of the job spec.
    """
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.extensions.exchange.fork import fork_run

    if step is not None and checkpoint is not None:
        raise SpecInvalid(f"expected --step or --checkpoint, found {step!r} and {checkpoint!r}: name one checkpoint")
    read = ui.resolved(spec, home)
    job = parse_spec({**read.model_dump(), "run": new}, origin=repr(str(spec)))
    lakehouse = ui.lakehouse_of(spec, home)
    parent = ui.known_spec(lakehouse, run, None, home)
    files = None if parent is None else tiers_of(parent).files
    done = fork_run(lakehouse, job, run, step=step, checkpoint_id=checkpoint, files=files)
    if as_json:
        ui.show_json(asdict(done))
    else:
        origin = f"{done.parent_checkpoint} (step {done.parent_step} of run {run})"
        ui.show_text(f"run {new} begins with checkpoint {done.checkpoint_id}, forked from {origin}")


@ui.extension_command(
    "dlac checkpoint export my-run weights.safetensors",
    "dlac checkpoint export my-run weights.safetensors --step 400",
    "dlac checkpoint export my-run my-model --config pretrained",
)
def export(
    run: ui.RunName,
    out: Annotated[Path, Argument(help="File to write, such as weights.safetensors. With --config: a new folder.")],
    step: ui.Step = None,
    part: Annotated[str, Option(help="Part of the state that has the weights, by its name in the script.")] = "model",
    config: Annotated[
        Path | None,
        Option(
            help="Folder with the model's config.json, which is copied with the tokenizer's files. `from_pretrained` loads the "
            "written folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Write a checkpoint's weights as safetensors. `dlac checkpoint identify` finds the checkpoint by the digest of a file."""
    from dlac_pipeline.extensions.exchange.export import export_weights

    lakehouse, tiers = _places_of_run(run, spec, home)
    ui.show_facts(asdict(export_weights(lakehouse, tiers, out, step=step, part=part, config=config)), as_json=as_json)


@ui.extension_command(
    "dlac checkpoint export-state my-run my-state",
    "dlac checkpoint export-state my-run my-state --step 400",
)
def export_state(
    run: ui.RunName,
    out: Annotated[Path, Argument(help="New folder to write.")],
    step: ui.Step = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Write model and optimizer of a sharded checkpoint as safetensors, as torch.distributed.checkpoint loads them.

    DeepSpeed's ZeRO 1 to 3 is converted. `dlac checkpoint adopt` begins a run with `DistributedState` from the folder.
    """
    from dlac_pipeline.extensions.exchange.export import export_tensors

    lakehouse, tiers = _places_of_run(run, spec, home)
    ui.show_facts(asdict(export_tensors(lakehouse, tiers, out, step=step)), as_json=as_json)


@ui.extension_command("dlac checkpoint identify weights.safetensors")
def identify(
    file: Annotated[
        Path, Argument(help="File that `dlac checkpoint export` wrote, or a copy of it.", exists=True, dir_okay=False)
    ],
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Identify the checkpoint of a file of weights, by its digest. `dlac sql` shows what it has consumed."""
    from dlac_pipeline.extensions.exchange.exported_files import checkpoint_of_file

    ui.show_facts(checkpoint_of_file(ui.lakehouse_of(spec, home), file), as_json=as_json)


@ui.extension_command(
    "dlac checkpoint adopt job.toml /old/checkpoints",
    "dlac checkpoint adopt job.toml /old/checkpoints --tag global_step400",
)
def adopt(
    spec: ui.SpecFile,
    folder: Annotated[
        Path,
        Argument(
            help="Folder of a checkpoint of DeepSpeed, torch.distributed.checkpoint or Hugging Face.", exists=True
        ),
    ],
    tag: Annotated[str | None, Option(help="DeepSpeed's tag. Unset: the tag in its file `latest`.")] = None,
    home: ui.Home = None,
) -> None:
    """Begin the spec's run from a checkpoint that DLAC did not write. Its consumption stays unknown.

    A checkpoint with more than tensors and plain values is refused. No code in it runs.
    """
    from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
    from dlac_pipeline.extensions.exchange.fork import adopt_checkpoint

    job = ui.resolved(spec, home)
    found = foreign_checkpoint(folder, tag=tag)
    checkpoint_id = adopt_checkpoint(ui.lakehouse_of(spec, home, create=True), job, found)
    ui.show_text(f"run {job.run} begins with checkpoint {checkpoint_id}, adopted from {found.origin}")


def _places_of_run(run: str, spec: Path | None, home: Path | None) -> tuple["Lakehouse", "Tiers"]:
    """Return the lakehouse, and the places of the run's checkpoints."""
    from dlac_pipeline.checkpoint.store import tiers_of

    lakehouse = ui.lakehouse_of(spec, home)
    return lakehouse, tiers_of(ui.spec_of_run(run, spec, home, lakehouse=lakehouse))
