"""Answers for people outside: what a model was trained on."""

import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import NoSuchLakehouse, SpecInvalid

PANEL = "Audit"
passport = typer.Typer(
    help="Group: passports of exported weights, which answer whether a document was trained on.", no_args_is_help=True
)
_SEEN = ("run", "checkpoint_id", "last_step", "pass", "source_table", "file_path", "row", "whole", "survives", "forks")
_Export = Annotated[
    Path, Argument(help="File or folder that `dlac checkpoint export` wrote, or a copy of it.", exists=True)
]


@ui.extension_command(
    "dlac summary my-run > summary.md",
    "dlac summary my-run --checkpoint 4200 --json",
)
def summary(
    run: ui.RunName,
    checkpoint: Annotated[str | None, Option(help="Id or step of a checkpoint. Unset: the head.")] = None,
    template: Annotated[str, Option(help="Form of the text.")] = "eu-2025",
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Summarize what a model was trained on, with the totals of the audit, also in the runs that it was forked from.

    eu-2025: the public summary of training content that the European Commission asks for, in Markdown. The provider completes it.
    """
    from dlac_pipeline.extensions.erasure.summary import read_template, training_content, write_summary

    form, lakehouse = read_template(template), ui.lakehouse_of(spec, home)
    runs = training_content(lakehouse, run, checkpoint)
    if as_json:
        ui.show_json(runs)
    else:
        ledger = ".".join(lakehouse.own("consumption").name())
        sys.stdout.write(ui.terminal_text(write_summary(runs, form, provenance=f"DLAC, table {ledger}")))


@ui.extension_command("dlac seen 4711", "dlac seen 2024-01-01 en --table lake.docs --run my-run")
def seen(
    key: Annotated[list[str], Argument(help="Value of each identity column, in their order, or the v3 row id.")],
    table: Annotated[str | None, Option(help="Only documents of this source table.")] = None,
    run: Annotated[str | None, Option(help="Only checkpoints of this run, and of those it was forked from.")] = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Show who has seen a document: checkpoints that consumed its row, also after its files were deleted (source.row_keys)."""
    from dlac_pipeline.extensions.erasure.seen import who_has_seen

    report = who_has_seen(ui.lakehouse_of(spec, home), key, table=table, run=run)
    if as_json:
        ui.show_json(report)
        return
    cells = [[str(ui.format_fact(name, each[name])) for name in _SEEN] for each in report["seen_by"]]
    names = [name.removesuffix("_id").replace("_", " ") for name in _SEEN]
    ui.show_table(names, cells, right=("pass", "last step", "row"), empty="\n".join(report["notes"]))
    for note in report["notes"] if cells else ():
        ui.show_text(note)


@ui.command(passport, None, "dlac passport write weights.safetensors")
def write(export: _Export, home: ui.Home = None, spec: ui.SpecOption = None, as_json: ui.AsJson = False) -> None:
    """Write the passport of exported weights beside them. The sources of their run have row_keys."""
    from dlac_pipeline.extensions.erasure.passport import passport_of, write_passport

    written = write_passport(ui.lakehouse_of(spec, home), export)
    if written is None:
        raise SpecInvalid(
            f"expected weights in {str(export)!r} of a run whose sources have row_keys, found that no data file which it was "
            "trained on has keys: set source.row_keys in the job spec of a run, and train it"
        )
    facts = {name: value for name, value in asdict(written).items() if name not in ("files", "identities")}
    ui.show_facts({"passport": passport_of(export), **facts}, as_json=as_json)


@ui.command(passport, None, "dlac passport check weights.safetensors 4711")
def check(
    export: _Export,
    document: Annotated[list[str], Argument(help="Value of each identity column of a document, in their order.")],
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Answer from the passport beside exported weights whether they were trained on a document, also without the lakehouse."""
    from dlac_pipeline.extensions.erasure.passport import OpenPassport

    with closing(OpenPassport(export)) as opened:
        is_known = False
        with suppress(NoSuchLakehouse):
            is_known = opened.is_in_ledger(ui.lakehouse_of(spec, home))
        seen, about = opened.has(document), opened.facts
    answer = "unknown" if about.incomplete else "no"
    facts = {
        "trained_on": "probably (1 in 256 other documents is found, too)" if seen else answer,
        "run": about.run,
        "checkpoint_id": about.checkpoint_id,
        "step": about.step,
        "unknown": "; ".join(about.incomplete) or None,
        "passport": "as in the ledger" if is_known else "not compared with the ledger, which is not here",
    }
    ui.show_facts(facts, as_json=as_json)
