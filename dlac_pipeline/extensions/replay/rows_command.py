"""The command `dlac rows`: the rows of a committed step."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.plain_json import strict_json

if TYPE_CHECKING:
    from dlac_pipeline.extensions.replay.step_rows import StepRow

PANEL = "Audit"
_TEXT_LENGTH = 80
_CELLS = ("rank", "node", "slot", "source_table", "file_path", "row_group", "row")


@ui.extension_command(
    "dlac rows my-run --step 4210",
    "dlac rows my-run --step 4210 --rank 3 --text body",
    "dlac rows my-run --step 4210 --json",
)
def rows(
    run: ui.RunName,
    step: Annotated[int, Option(help="Optimizer step, from 1.")],
    rank: Annotated[int | None, Option(help="Only the rows of this rank.")] = None,
    text: Annotated[str | None, Option(help="Column of the source whose values are shown too.")] = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """List the rows of a committed step, with the rank and node that trained on each: computed from the order, logged nowhere."""
    from dlac_pipeline.extensions.replay.step_rows import StepRows

    lakehouse = ui.lakehouse_of(spec, home)
    mine = StepRows(lakehouse, run, spec=ui.given_spec(run, spec, home)).of(step, rank=rank, column=text)
    if as_json:
        sys.stdout.write(strict_json([each.to_json() for each in mine]) + "\n")
        return
    show_step_rows(mine, text, {}, empty=f"rank {rank} trained no row in step {step}")


def show_step_rows(
    rows: "Sequence[StepRow]", text: str | None, first: Mapping[str, Sequence[str]], *, empty: str
) -> None:
    """Show rows of a step as a table. `first` are further columns, before these."""
    names = [*first, "rank", "node", "slot", "table", "file", "row group", "row", "items", *([text] if text else ())]
    cells = [
        (
            *(values[place] for values in first.values()),
            *("" if (value := getattr(each, name)) is None else str(value) for name in _CELLS),
            _items(each.first_item, each.end_item),
            *([_start_of(str(each.value))] if text else ()),
        )
        for place, each in enumerate(rows)
    ]
    ui.show_table(names, cells, right=("loss", "rank", "slot", "row group", "row"), empty=empty)


def _start_of(text: str) -> str:
    return f"{line[: _TEXT_LENGTH - 1]}…" if len(line := " ".join(text.split())) > _TEXT_LENGTH else line


def _items(first: int | None, end: int | None) -> str:
    """Return which items of a row a sample has. Empty: all."""
    return "" if first is None and end is None else f"{first or 0} to {'the end' if end is None else end}"
