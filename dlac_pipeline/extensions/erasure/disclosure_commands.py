"""Answers for people outside: what a model was trained on."""

import sys
from typing import Annotated

from typer import Option

from dlac_pipeline.cli import shared as ui

PANEL = "Look"


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
