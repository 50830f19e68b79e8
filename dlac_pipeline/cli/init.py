"""`dlac init`: from a table, or from Parquet files, to a project that trains."""

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name
from dlac_pipeline.spec.job_spec import home_folder

app = typer.Typer()
_WILD = re.compile(r"[*?\[]")
_MODELS = {
    "numbers": "predicts the last of them from the others",
    "tokens": "predicts each token from the one before",
    "text": "predicts each token of tokenizer.json from the one before",
}


@ui.command(
    app,
    ui.TRAIN,
    "dlac init demo.points --columns x,y",
    "dlac init /data/points --run first",
    "dlac init 's3://bucket/pages/**/*.parquet' --table docs.pages --into pages",
    "dlac init docs.pages --catalog prod",
)
def init(
    source: Annotated[
        str, Argument(help="Table, as namespace.table, or Parquet files: a folder, a bucket, a file or a pattern.")
    ],
    into: Annotated[Path, Option(help="Folder of the new files. No file in it is overwritten.")] = Path(),
    run: Annotated[str | None, Option(help="Name of the run. Unset: that of the table.")] = None,
    columns: Annotated[
        str | None,
        Option(
            help="Columns to train on, as a,b. Unset: lists of integers, else all numbers, or else a text, without "
            "partition keys. Of numbers, the last one is predicted."
        ),
    ] = None,
    table: Annotated[
        str | None, Option(help="For Parquet files: the name of their table. Unset: lake and the name of the folder.")
    ] = None,
    catalog: Annotated[
        str | None, Option(help="Catalog, by its name in PyIceberg's configuration. Unset: the one in --home.")
    ] = None,
    home: ui.Home = None,
) -> None:
    """Write a job file, a training script and a Dagster project for a table, or for Parquet files in their place.

    Then train with them at once, and put your own model into train.py.
    """
    from dlac_pipeline.lakehouse.iceberg.connect import connect
    from dlac_pipeline.lakehouse.registration.register import register
    from dlac_pipeline.operations.new_project import check_free, find_trainable, write_project

    files = _is_location(source)
    name = (table or _table_of(source)) if files else source
    run = check_run_name(run or _run_of(name))
    check_free(into, run)
    config = LakehouseConfig(name=catalog).at_home(home or home_folder())
    lakehouse = connect(config, create=files or catalog is not None)
    if files:
        register(lakehouse, name, source)
        typer.echo(f"registered {source} as table {name}", err=True)  # also if its columns are refused
    wanted = [each.strip() for each in columns.split(",")] if columns else []
    found = find_trainable(lakehouse, name, wanted)
    written = write_project(into, run, found, {} if catalog is None else {"name": catalog})
    ui.show_text(f"wrote {', '.join(written)}")
    ui.show_text(f"train.py reads {', '.join(found.columns)} of {name}, and {_MODELS[found.kind]}")
    _show_next(run, into, ui.place_options(None, home))


def _is_location(source: str) -> bool:
    """Return True for files, False for a name such as namespace.table. Raise `SpecInvalid` if it is neither."""
    if "/" in source or _WILD.search(source) or source.endswith(".parquet") or Path(source).exists():
        return True
    if "." in source:
        return False
    raise SpecInvalid(
        f"expected a table as namespace.table, or a folder or bucket of Parquet files, found {source!r}, and no such folder: "
        "correct the path, or write the namespace before the table"
    )


def _table_of(location: str) -> str:
    """Return the name of a table after the last folder of a location without wildcards, or its file."""
    wild = _WILD.search(location)
    place = location[: location.rfind("/", 0, wild.start())] if wild else location
    last = place.rstrip("/").rpartition("/")[2] if "://" in place else Path(place).absolute().name
    return f"lake.{re.sub(r'[^A-Za-z0-9_]', '_', last.removesuffix('.parquet'))}"


def _run_of(table: str) -> str:
    """Return a name that a run can have, after a table."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", table.rpartition(".")[2]).lstrip("._-")[:100] or "first"


def _show_next(run: str, into: Path, options: tuple[str, ...]) -> None:
    given = "".join(f" {shlex.quote(option)}" for option in options)
    home = f"DLAC_HOME={shlex.quote(str(Path(options[1]).absolute()))} " if options else ""
    ui.show_text("next:")
    ui.show_text(f"    dlac train {shlex.quote(str(into / 'job.toml'))}{given}")
    ui.show_text(f"    dlac audit {run}{given}")
    ui.show_text(f"    {home}dagster dev -w {shlex.quote(str(into / 'workspace.yaml'))}")
