"""Commands for those who have no table or job file yet: `dlac init`, `dlac new-run` and `dlac table register`."""

import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import NoSuchTable, SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name

if TYPE_CHECKING:
    from dlac_pipeline.extensions.registration.new_project import Trainable
    from dlac_pipeline.lakehouse.config import LakehouseConfig
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.spec.mesh_spec import MeshSpec

PANEL = "Train"
_WILD = re.compile(r"[*?\[]")
_MODELS = {
    "tokens": "predicts each token from the one before",
    "text": "predicts each token of tokenizer.json from the one before",
}
_SHOWN_COLUMNS = 12
_Source = Annotated[
    str,
    Argument(help="Table, as namespace.table, or Parquet files: a folder, a bucket, a file or a pattern."),
]
_Columns = Annotated[
    str | None,
    Option(
        help="Columns to train on, as a,b. Unset: lists of integers, else documents, all numbers, or the longest text, "
        "without partition keys and ids. Of numbers, the last one is predicted, unset: label, target, y, class or outcome."
    ),
]


@ui.extension_command(
    "dlac init demo.points --columns x,y",
    "dlac init /data/points --run first",
    "dlac init 's3://bucket/pages/**/*.parquet' --table docs.pages --into pages",
    "dlac init docs.pages --catalog prod",
    "dlac init docs.pages --mesh tp=2,pp=2",
)
def init(
    source: _Source,
    into: Annotated[Path, Option(help="Folder of the new files. No file in it is overwritten.")] = Path(),
    run: Annotated[str | None, Option(help="Name of the run. Unset: that of the table.")] = None,
    columns: _Columns = None,
    table: Annotated[
        str | None, Option(help="For Parquet files: the name of their table. Unset: lake and the name of the folder.")
    ] = None,
    catalog: Annotated[
        str | None, Option(help="Catalog, by its name in PyIceberg's configuration. Unset: the one in --home.")
    ] = None,
    mesh: Annotated[
        str,
        Option(help="Parts of a model that does not fit one device, as tp=2,pp=2: the script is a GPT on this mesh."),
    ] = "",
    home: ui.Home = None,
) -> None:
    """Write a job file, a training script and a Dagster project for a table, or for Parquet files in their place.

    Then train with them at once, and put your own model into train.py. A job file belongs to one run: a second experiment is a
    second file, which `dlac new-run` writes.
    """
    from dlac_pipeline.extensions.registration.new_project import check_free, find_trainable, write_project

    name = (table or _table_of(source)) if _is_location(source) else source
    named = re.sub(r"[^A-Za-z0-9._-]", "-", name.rpartition(".")[2]).lstrip("._-")[:100]
    run = check_run_name(run or named or "first")
    check_free(into, run)
    wanted_mesh = _mesh_of(mesh)
    wanted = [each.strip() for each in columns.split(",")] if columns else []
    with ExitStack() as undo:
        if _is_location(source):
            lakehouse = _register_files(source, name, ui.config_of(home, catalog), undo)
        else:
            lakehouse = ui.lakehouse_of(None, home, create=catalog is not None, catalog=catalog)
        found = find_trainable(lakehouse, name, wanted)
        written = write_project(into, run, found, {} if catalog is None else {"name": catalog}, wanted_mesh)
        undo.pop_all()
    if _is_location(source):
        typer.echo(f"registered {source} as table {name}", err=True)
    ui.show_text(f"wrote {', '.join(written)}")
    _show_choice(found)
    _show_next(run, into / "job.toml", ui.place_options(None, home))


@ui.extension_command("dlac new-run second", "dlac new-run second pages/job.toml")
def new_run(
    run: Annotated[str, Argument(help="Name of the run, and of its job file.")],
    job_file: Annotated[Path, Argument(help="Job file of another run, which is copied.")] = Path("job.toml"),
    home: ui.Home = None,
) -> None:
    """Write the job file of another run, a copy beside the first one, and its Dagster asset."""
    from dlac_pipeline.extensions.registration.new_project import add_run

    written = add_run(job_file, check_run_name(run))
    ui.show_text(f"wrote {', '.join(written)}, after {job_file}")
    _show_next(run, job_file.with_name(f"{run}{job_file.suffix}"), ui.place_options(None, home))


@ui.extension_command(
    "dlac table register docs.pages 's3://bucket/pages/**/*.parquet'",
    "dlac table register docs.pages /data/pages --dry-run",
)
def register(
    table: Annotated[str, Argument(help="Name of the Iceberg table, as namespace.table.")],
    location: Annotated[str, Argument(help="Folder, bucket, file, or a pattern with *, ** and ?.")],
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Look at the files, and commit nothing.")] = False,
    as_json: ui.AsJson = False,
) -> None:
    """Make Parquet files an Iceberg table in their place, or add new files to it. Nothing is copied.

    Folders such as day=2026-11-25 are partitions. A file that has changed under its name is refused.
    """
    from dlac_pipeline.extensions.registration.register import preview
    from dlac_pipeline.extensions.registration.register import register as register_files

    config = ui.config_of(home) if spec is None else ui.resolved(spec, home).lakehouse
    if dry_run and not _has_catalog(config):
        done = preview(config, table, location)
    else:
        done = register_files(_lakehouse_for_files(config, table, location), table, location, dry_run=dry_run)
    ui.show_facts(asdict(done), as_json=as_json)


def _mesh_of(text: str) -> "MeshSpec":
    """Return the mesh that an option states. Raise `SpecInvalid` if it states none."""
    from pydantic import ValidationError

    from dlac_pipeline.spec.mesh_spec import MeshSpec

    given = [each.strip().partition("=")[::2] for each in text.split(",") if each.strip()]
    names = [name for name, _ in given]
    try:
        if not {*names} <= {"tp", "pp"} or len({*names}) < len(names):
            raise ValueError(
                "tp and pp once each; dp is what is left of the world size, and cp and ep need a script of your own"
            )
        return MeshSpec.model_validate(dict(given))
    except ValueError as err:
        why = err.errors()[0]["msg"] if isinstance(err, ValidationError) else str(err)
        raise SpecInvalid(f"expected numbers of ranks in --mesh, such as tp=2,pp=2, found {text!r}: {why}") from err


def _has_catalog(config: "LakehouseConfig") -> bool:
    """Return False for an SQLite catalog whose file does not exist."""
    from dlac_pipeline.lakehouse.config import sqlite_file

    file = sqlite_file(config.uri)
    return file is None or file.exists()


def _lakehouse_for_files(config: "LakehouseConfig", table: str, location: str) -> "Lakehouse":
    """Return the lakehouse in which Parquet files at a location become a table. Files that cannot be one make none."""
    from dlac_pipeline.extensions.registration.register import preview
    from dlac_pipeline.lakehouse.iceberg.connect import connect

    if not _has_catalog(config):
        preview(config, table, location)
    return connect(config)


def _register_files(source: str, name: str, config: "LakehouseConfig", undo: ExitStack) -> "Lakehouse":
    """Register Parquet files as a table. `undo` drops the table if it is new, because no project may fit its columns."""
    from dlac_pipeline.extensions.registration.register import register as register_files

    lakehouse = _lakehouse_for_files(config, name, source)
    try:
        lakehouse.load(name)
    except NoSuchTable:
        undo.callback(_drop, lakehouse, name)
    done = register_files(lakehouse, name, source)
    for column in done.left_out:
        typer.echo(f"left out column {ui.terminal_text(column)}", err=True)
    return lakehouse


def _drop(lakehouse: "Lakehouse", name: str) -> None:
    """Drop a table that this command has made. Its files stay, because they are the user's."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    with suppress(NoSuchNamespaceError, NoSuchTableError):
        lakehouse.catalog.drop_table(name)


def _show_choice(found: "Trainable") -> None:
    """Show the columns of a generated script, those that it leaves out, and how to choose others."""
    *features, target = found.columns
    loss = f"{found.classes} classes, by cross entropy" if found.classes else "a quantity, by squared error"
    model = f"predicts {target} ({loss}) from {'the others' if features else 'itself, for want of others'}"
    ui.show_text(f"train.py reads {_listed(found.columns)} of {found.table}, and {_MODELS.get(found.kind, model)}")
    if found.filtered is not None:
        ui.show_text(f"rows without {found.filtered} are left out, by source.row_filter")
    if found.masked:
        ui.show_text(f"nulls of {_listed(found.masked)} read as 0, and a feature NAME.valid shows the model where")
    if found.left_out:
        ui.show_text(f"left out: {_listed([f'{name} ({why})' for name, why in found.left_out.items()])}")
    ui.show_text(
        "to change that: --columns a,b with another --into (of numbers, the last one is predicted), or source.columns in "
        "job.toml and train.py. source.transform converts columns of other types"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {more} more" if more > 0 else "")


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


def _show_next(run: str, job_file: Path, options: tuple[str, ...]) -> None:
    given = "".join(f" {shlex.quote(option)}" for option in options)
    home = f"DLAC_HOME={shlex.quote(str(Path(options[1]).absolute()))} " if options else ""
    ui.show_text("next:")
    ui.show_text(f"    dlac train {shlex.quote(str(job_file))}{given}")
    ui.show_text(f"    dlac audit {run}{given}")
    ui.show_text(f"    {home}dagster dev -w {shlex.quote(str(job_file.with_name('workspace.yaml')))}")
