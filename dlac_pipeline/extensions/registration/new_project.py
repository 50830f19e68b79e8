"""A project for a table: job file, training script, Dagster project. In: the table. Out: files, from templates in project/."""

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from pyarrow import ArrowException
from pyiceberg import types as ice
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dlac_pipeline.extensions.registration.column_choice import (
    Kind,
    Sample,
    check_wanted,
    choose_columns,
    count_classes,
)
from dlac_pipeline.lakehouse.errors import DataFileUnreadable, EmptyPlan, SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.files.open_file import open_file
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, name_mapping_of
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.rows.columns import check_names
from dlac_pipeline.spec.job_spec import parse_spec, read_spec
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL, MeshSpec

_HERE = Path(__file__).parent
_NUMBERS = (ice.BooleanType, ice.IntegerType, ice.LongType, ice.FloatType, ice.DoubleType)
_TIMES = (ice.DateType, ice.TimeType, ice.TimestampType, ice.TimestamptzType)
_VOCABULARY = 1024
"""Tokens of the model, where their number is unknown."""
_SAMPLED_ROWS = 256
_QUANTITY = """\
        errors = model(stack(batch, FEATURES)) - stack(batch, [TARGET])
        loss = batch.mean(errors.square()[:, 0])"""
_CLASSES = """\
        scores = model(stack(batch, FEATURES))
        losses = torch.nn.functional.cross_entropy(scores, batch[TARGET].long(), reduction="none")
        loss = batch.mean(losses)"""
"""The loss of a quantity, and of classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainable:
    """Columns of a table on which a generated script trains at once."""

    table: str
    kind: Kind
    columns: tuple[str, ...]
    """Columns of the kind. Of numbers, the last one is the target."""
    with_nulls: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why each other column is left out."""
    classes: int = 0
    """Classes of the target. 0: it is a quantity."""

    @property
    def filtered(self) -> str | None:
        """The column whose nulls are left out: a text, tokens, or a target."""
        name = self.columns[-1]
        return name if name in self.with_nulls else None

    @property
    def masked(self) -> tuple[str, ...]:
        """Features with nulls. A null reads as 0, and the column NAME.valid is a feature that shows it."""
        return tuple(name for name in self.with_nulls if self.kind == "numbers" and name != self.filtered)


def find_trainable(lakehouse: Lakehouse, table: str, wanted: Sequence[str] = ()) -> Trainable:
    """Return the wanted columns of a table, or else the columns that a first run trains on.

    Raises:
        NoSuchTable: there is no such table.
        NoSuchColumn: a wanted column does not exist.
        UnsupportedColumn: no script is generated for the columns, or they cannot be read.
        DataFileUnreadable: a data file cannot be read.
        EmptyPlan: the table has no row.
    """
    loaded = lakehouse.load(table)
    check_names(loaded.schema(), wanted, setting=f"--columns, of table {table!r}")
    head = loaded.current_snapshot()
    with reachable(lakehouse.config.uri):
        manifests = [] if head is None else head.manifests(loaded.io)
        data = (each for each in manifests if each.content == ManifestContent.DATA)
        files = [entry.data_file for each in data for entry in each.fetch_manifest_entry(loaded.io)]
    if not sum(file.record_count for file in files):
        raise EmptyPlan(f"expected rows in table {table!r}, found none: append some, or name another table")
    kinds = {field.name: _kind_of(field.field_type) for field in loaded.schema().fields}
    sample = _sample(loaded, [name for name, kind in kinds.items() if kind != "other"], files[0])
    if wanted:
        choice = check_wanted(kinds, wanted)
    else:
        types = {field.name: str(field.field_type) for field in loaded.schema().fields}
        choice = choose_columns(kinds, types, _partition_keys(loaded), sample)
    _check_readable(loaded, choice.columns, files[0])
    fields = [loaded.schema().find_field(name) for name in choice.columns]
    counts = [file.null_value_counts or {} for file in files]
    optional = [each for each in fields if not each.required]
    nulls = tuple(each.name for each in optional if any(count.get(each.field_id) != 0 for count in counts))
    target, kind = fields[-1], sample[fields[-1].name].type if fields[-1].name in sample else None
    return Trainable(
        table=table,
        kind=choice.kind,
        columns=choice.columns,
        with_nulls=nulls,
        left_out=choice.left_out,
        classes=count_classes(target.name, kind, _bounds(target, files), sample) if len(fields) > 1 else 0,
    )


def _kind_of(column_type: ice.IcebergType) -> Kind:
    if isinstance(column_type, ice.ListType):
        return "tokens" if isinstance(column_type.element_type, ice.IntegerType | ice.LongType) else "other"
    if isinstance(column_type, ice.StringType):
        return "text"
    if isinstance(column_type, _NUMBERS):
        return "numbers"
    return "times" if isinstance(column_type, _TIMES) else "other"


def _partition_keys(table: Table) -> set[str]:
    keys = {field.source_id for field in table.spec().fields if isinstance(field.transform, IdentityTransform)}
    return {field.name for field in table.schema().fields if field.field_id in keys}


def _sample(table: Table, names: Sequence[str], one: DataFile) -> Sample:
    """Return the first rows of a data file, of columns that have the same names in it."""
    with _reading(one), table.io.new_input(one.file_path).open() as stream:
        opened = open_file(one.file_path, stream, ())
        found = [name for name in names if name in opened.footer.schema.names]
        if not found or not opened.footer.rows:
            return {}
        rows = opened.read(0, found).slice(0, _SAMPLED_ROWS)
    return {name: rows[name].combine_chunks() for name in found}


def _bounds(field: ice.NestedField, files: Sequence[DataFile]) -> tuple[Any, Any] | None:
    """Return the least and the largest value of a column of numbers in all files, or None if a file does not state it."""
    if not isinstance(field.field_type, _NUMBERS):
        return None
    found = [(file.lower_bounds or {}, file.upper_bounds or {}) for file in files if file.record_count]
    if not all(field.field_id in bounds for pair in found for bounds in pair):
        return None
    least, largest = (
        [from_bytes(field.field_type, each[field.field_id]) for each in side] for side in zip(*found, strict=True)
    )
    return min(least), max(largest)


def _check_readable(table: Table, columns: Sequence[str], one: DataFile) -> None:
    """Check the types of columns in one data file, which Iceberg does not record: unsigned numbers may be too large."""
    schema, mapping = table.schema(), name_mapping_of(table)
    keys = {field.source_id: None for field in table.spec().fields}  # which may be in no file
    try:
        with _reading(one), table.io.new_input(one.file_path).open() as stream:
            found = open_file(one.file_path, stream, schema.fields).footer.schema
        FileColumns.of(found, schema, columns, name_mapping=mapping, partition_values=keys)
    except UnsupportedColumn as err:
        raise UnsupportedColumn(f"{err}, or name other columns with --columns") from err


@contextmanager
def _reading(one: DataFile) -> Iterator[None]:
    try:
        yield
    except (OSError, ArrowException) as err:
        raise DataFileUnreadable(f"expected a data file at {one.file_path!r}, found {err}: restore it") from err


def check_free(folder: Path, run: str) -> None:
    """Raise `SpecInvalid` if a folder has a file of a project, or cannot be looked into."""
    with _writing():
        found = [name for name in _templates(run) if (folder / name).exists()]
    if found:
        raise SpecInvalid(
            f"expected a folder without the files of a project, found {', '.join(found)} in {str(folder)!r}: nothing was "
            "written; name another folder with --into, or move these files"
        )


def _templates(run: str, script: str = "numbers") -> dict[str, Path]:
    """Return the templates of a project's files by the names of these files. `script`: numbers, tokens or mesh."""
    templates = {"train.py": _HERE / f"train_{script}.py.template"}
    for path in sorted((_HERE / "project").rglob("*.*")):
        name = str(path.relative_to(_HERE / "project")).replace("RUN", _module_name(run))
        templates[name.removesuffix(".template")] = path
    return templates


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise SpecInvalid(f"expected a folder to write into, found {err}: name another one with --into") from err


def write_project(
    folder: Path, run: str, found: Trainable, lakehouse: Mapping[str, str], mesh: MeshSpec = DATA_PARALLEL
) -> list[str]:
    """Write the files of a project, and return their names. `lakehouse` are settings as a job file has them.

    With a mesh, the script is the one of examples/mesh, and has as many ranks as one replica of the model.

    Texts are tokenized by the tokenizer.json of the folder. Without one, a file is written in which each byte is a token.
    Raise `SpecInvalid`, and write nothing, if a file exists or cannot be written, or the run cannot have this name.
    """
    texts, vocabulary, tokenizer = {}, _VOCABULARY, ""
    if found.kind == "text":
        tokenizer = "tokenizer.json"
        if not (folder / tokenizer).exists():
            texts["tokenizer.json"], vocabulary = _byte_tokenizer(), 256
    features = [*(found.columns[:-1] or found.columns), *(f"{name}.valid" for name in found.masked)]
    values = {"features": _json(features), "target": _json(found.columns[-1])}
    values |= {"vocabulary": str(vocabulary), "lakehouse": _json(lakehouse), "job_file": "job.toml"}
    values |= {"outputs": str(found.classes or 1), "loss": _CLASSES if found.classes else _QUANTITY}
    values |= _job_values(run, found, tokenizer, lakehouse)
    script = "numbers" if found.kind == "numbers" else "tokens"
    if mesh != DATA_PARALLEL:
        if script == "numbers":
            raise SpecInvalid(
                f"expected tokens or a text to train a GPT on a mesh, found {list(found.columns)!r}: name such a column with "
                "--columns, or leave out --mesh"
            )
        script, values["ranks"] = "mesh", str(mesh.replica_ranks)
        values["batch_size"] = str(math.lcm(int(values["batch_size"]), mesh.pp))  # each stage takes equal micro-batches
        params = {"layers": str(2 * mesh.pp), "width": str(32 * mesh.tp), "vocabulary": str(vocabulary)}
        dimensions = {name: size for name, size in mesh.model_dump().items() if size > 1}
        for section, settings in (("launch.mesh", dimensions), ("params", params)):
            values["more"] += f"\n[{section}]\n" + "".join(itertools.starmap(_setting, settings.items()))
    for name, template in _templates(run, script).items():
        texts[name] = Template(template.read_text()).substitute(values)
    parse_spec(tomllib.loads(texts["job.toml"]), origin="job.toml")
    return _write_new(folder, texts)


def _write_new(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write new files, all or none, and return their names."""
    with _writing(), ExitStack() as undo:
        for name in texts:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                undo.callback((folder / name).unlink)
                file.write(text)
        undo.pop_all()
    return sorted(texts)


def add_run(job_file: Path, run: str) -> list[str]:
    """Copy a job file for a run of another name, with its Dagster asset in a project. Return the new files.

    Raise `SpecInvalid`, and write nothing, if the job file is wrong, or a file exists or cannot be written.
    """
    folder, first = job_file.parent, read_spec(job_file)
    name = f"{run}{job_file.suffix}"
    equals = "=" if job_file.suffix == ".toml" else ":"
    pattern = re.compile(rf"^(run *{equals} *)([\"']?){re.escape(first.run)}\2(?= *(#|$))", re.MULTILINE)
    text, found = pattern.subn(lambda line: f"{line[1]}{_json(run)}", job_file.read_text(encoding="utf-8"))
    if found != 1:
        raise SpecInvalid(
            f"expected one line such as 'run {equals} \"{first.run}\"' in {str(job_file)!r}, found {found}: copy the file by hand"
        )
    texts = {name: text}
    if (folder / "assets").is_dir():
        defs = (_HERE / "project" / "assets" / "RUN" / "defs.yaml").read_text()
        texts[f"assets/{_module_name(run)}/defs.yaml"] = Template(defs).substitute(job_file=name)
    with _writing():
        taken = [each for each in texts if (folder / each).exists()]
    if taken:
        raise SpecInvalid(
            f"expected a run without files in {str(folder)!r}, found {', '.join(taken)}: nothing was written; choose another "
            "name"
        )
    return _write_new(folder, texts)


def _module_name(run: str) -> str:
    return re.sub(r"\W", "_", run)


def _job_values(run: str, found: Trainable, tokenizer: str, lakehouse: Mapping[str, str]) -> dict[str, str]:
    rows, more = "", ""
    if found.filtered is not None:
        column = found.filtered.replace('"', '""')
        rows = _setting("row_filter", f'"{column}" IS NOT NULL')
    if found.kind != "numbers":
        more += "\n[sequences]\n" + _setting("length", 128) + (_setting("tokenizer", tokenizer) if tokenizer else "")
    elif found.masked:
        rows += _setting("nullable", found.masked)
    if lakehouse:
        more += "\n[lakehouse]\n" + "".join(_setting(name, value) for name, value in lakehouse.items())
    quoted = {"run": _json(run), "table": _json(found.table), "columns": _json(found.columns)}
    return {
        **quoted,
        "ranks": "1",
        "batch_size": "128" if found.kind == "numbers" else "16",
        "rows": rows,
        "more": more,
    }


def _json(value: object) -> str:
    """Return a value as TOML, YAML and Python have it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # which TOML refuses


def _setting(name: str, value: object) -> str:
    return f"{name} = {_json(value)}\n"


def scaffold_job(run: str) -> str:
    """Return a job file to complete."""
    found = Trainable(table="namespace.table", kind="numbers", columns=("x",), with_nulls=())
    return Template((_HERE / "project" / "job.toml").read_text()).substitute(_job_values(run, found, "", {}))


def _byte_tokenizer() -> str:
    """Return the file of a tokenizer in which each byte of a text is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str(pretty=True))
