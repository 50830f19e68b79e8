"""Questions about data: the rows of a step."""

import sys
from textwrap import shorten
from typing import Annotated

import typer

from dlac_pipeline.audit.wording import table_columns
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.plain_json import strict_json

app = typer.Typer()
_TEXT_LENGTH = 80


@ui.command(
    app,
    ui.LOOK,
    "dlac rows my-run --step 4210",
    "dlac rows my-run --step 4210 --rank 3 --text body",
    "dlac rows my-run --step 4210 --json",
)
def rows(
    run: ui.RunName,
    step: Annotated[int, typer.Option(help="Optimizer step, from 1.", min=1)],
    rank: Annotated[int | None, typer.Option(help="Only the rows of this rank.", min=0)] = None,
    text: Annotated[str | None, typer.Option(help="Column of the source whose values are shown too.")] = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """List the rows of a committed step, with the rank and node that trained on each: computed from the order, logged nowhere."""
    from dlac_pipeline.operations.step_rows import StepRows

    lakehouse = ui.lakehouse_of(spec, home)
    found = StepRows(lakehouse, run, spec=ui.given_spec(run, spec, home)).of(step, column=text)
    mine = [each for each in found if rank is None or each.rank == rank]
    if as_json:
        sys.stdout.write(strict_json([each.to_json() for each in mine], default=str) + "\n")
        return
    names = ["rank", "node", "slot", "table", "file", "row group", "row", "items", *([text] if text else ())]
    cells = [
        (
            str(each.rank),
            each.node or "",
            str(each.slot),
            each.source_table,
            each.file_path,
            str(each.row_group),
            str(each.row),
            _items(each.first_item, each.end_item),
            *([shorten(str(each.value), _TEXT_LENGTH, placeholder="…")] if text else ()),
        )
        for each in mine
    ]
    columns = table_columns(tuple(names), right=("rank", "slot", "row group", "row"), long=("file",))
    ui.show_table(columns, cells, empty=f"rank {rank} trained no row in step {step}")


def _items(first: int | None, end: int | None) -> str:
    """Return which items of a row a sample has. Empty: all."""
    return "" if first is None and end is None else f"{first or 0} to {'the end' if end is None else end}"
