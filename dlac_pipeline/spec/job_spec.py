"""The job spec: the one typed description of a training run, read from TOML or YAML, shared by the CLI and Dagster."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from dlac_pipeline.lakehouse.config import LakehouseConfig, checked_address, checked_home
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name
from dlac_pipeline.lakehouse.masking import note_secrets
from dlac_pipeline.lakehouse.source_names import ICEBERG, SOURCES, external_identifier
from dlac_pipeline.spec import spec_problems
from dlac_pipeline.spec.bounds import LONGEST_S, MOST_STEPS
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.spec.sections import (
    SECTIONS,
    EventReceiver,
    ExtensionSection,
    UnreadSection,
    read_section,
    section_classes,
)

ENGINES = Door("dlac.engines", "engine")
"""Engines of extensions, each a class with the protocol `Engine` of `dlac_pipeline.checkpoint.engines.engine`."""
_MOST_VALUES = 100_000
SectionT = TypeVar("SectionT", bound=ExtensionSection)


class SourceSpec(spec_problems.Section):
    """Source of rows."""

    format: Annotated[str, spec_problems.name_in(SOURCES, "source.format", ICEBERG)] = ICEBERG
    """Format of the table: "iceberg", "delta", "hudi", or another entry point of dlac.sources. The table is read in place."""
    table: str
    """The table to train from, as namespace.table, or catalog:namespace.table for a catalog of PyIceberg's configuration. Of
    other formats: its location, a folder or s3://bucket/path."""
    version: Annotated[int | str, spec_problems.name_or_number(-(2**63), 2**63 - 1)] | None = None
    """Version of the table to pin: a snapshot id, or the name of a branch or tag. Of Delta: a number. Of Hudi: an instant. Unset:
    the newest version when the plan is made."""
    name: str = ""
    """Name of the source in audits and messages. Empty: the table's."""
    columns: list[str]
    """Columns that become tensors, in this order."""
    row_filter: str | None = None
    """Rows to read, as an SQL condition, e.g. "length > 10". Unset: all rows."""
    exclude: list[str] = Field(default_factory=list)
    """Rows to exclude, each an SQL condition. More can be added later, with a new leg."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Share of the samples in a mixture, relative to the other weights."""
    passes: int | None = Field(default=None, ge=0, le=1_000_000)
    """Passes before the source leaves the mixture. 0: repeated until the run ends. Unset: order.passes."""
    place: Literal["mixed", "late"] = "mixed"
    """"mixed": among the samples of all sources. "late": after all samples of the sources that are mixed. If its rows have to be
    forgotten, few steps are repeated."""
    follow: Literal["pinned", "appends", "stream"] = "pinned"
    """"pinned": read the planned snapshot. "appends": each launch also reads the rows that were appended since, in one pass. Rows
    that do not fill a batch wait for the next launch. "stream": the launch waits for appended rows, and trains them too."""
    on_overwrite: Literal["stop", "read", "ignore"] = "stop"
    """Policy of a following source for overwritten rows: stop with an error, read new rows, or ignore them."""
    identity_columns: list[str] = Field(default_factory=list)
    """Columns that identify a row, also after the table was rewritten."""
    row_keys: bool = False
    """Record a key of each row of planned data files, for `dlac seen`: of identity_columns, else the identifier fields of the
    table, else v3 row ids. A key takes about 12 bytes."""
    pin: Literal["tag", "none"] = "tag"
    """"tag": an Iceberg tag protects the snapshot from expiry. "none": for a table without write access. The run is then exact
    until the snapshot expires, and stops afterwards."""
    nullable: list[str] = Field(default_factory=list)
    """Columns whose nulls read as zeros, with a bool tensor "<name>.valid"."""
    ragged: list[str] = Field(default_factory=list)
    """List columns of varying length: flat values, with "<name>.offsets"."""
    transform: str = ""
    """Function from Arrow batch to Arrow batch, "file.py:function" or "package.module:function"."""
    on_reject: Literal["fail", "quarantine"] = "fail"
    """Policy for rows at which the transform raises, or whose text cannot be tokenized."""
    on_unreadable: Literal["fail", "quarantine"] = "fail"
    """Policy for row groups that are missing or do not decode: the run stops, or continues without them."""

    @field_validator("table")
    @classmethod
    def _is_a_name(cls, table: str, info: ValidationInfo) -> str:
        table_format = info.data.get("format")
        if table_format is None:  # it is wrong, and so the meaning of the name is unknown
            return table
        if table_format != ICEBERG:
            return external_identifier(table_format, table)
        namespace, _, name = table.rpartition(".")
        if not name.strip() or not all(part.strip() for part in namespace.split(".")):
            raise ValueError(f"expected namespace.table, found {table!r}")
        return table

    @model_validator(mode="after")
    def _has_such_versions(self) -> SourceSpec:
        if self.format != ICEBERG and (self.ref or (self.snapshot_id or 0) < 0):
            raise ValueError(f'expected the number of a version with format = "{self.format}", found {self.version!r}')
        if self.ref and self.follows:
            raise ValueError(
                f"expected a source that follows appends without a branch or tag, found version {self.ref!r}: only main can be "
                'followed; set follow = "pinned", or leave version out'
            )
        return self

    @property
    def follows(self) -> bool:
        """True if rows that are appended to the table are read."""
        return self.follow != "pinned"

    @model_validator(mode="after")
    def _declares_read_columns(self) -> SourceSpec:
        declared = [name for name in ("nullable", "ragged") if getattr(self, name)]
        if self.transform and declared:
            raise ValueError(
                f"expected neither nullable nor ragged beside transform, whose result has neither nulls nor ragged lists, found "
                f"{declared[0]} = {getattr(self, declared[0])!r}: remove it, and fill nulls or pad lists in the transform"
            )
        return self

    @property
    def snapshot_id(self) -> int | None:
        """The snapshot to pin, or None for that of `ref`."""
        return self.version if isinstance(self.version, int) else None

    @property
    def ref(self) -> str:
        """Branch or tag whose snapshot is pinned. Empty: main."""
        return self.version if isinstance(self.version, str) else ""

    @field_validator("row_filter")
    @classmethod
    def _selects_rows(cls, row_filter: str | None) -> str | None:
        if row_filter is not None and not row_filter.strip():
            raise ValueError(
                f'expected rows to read, such as "length > 10", found the blank {row_filter!r}: leave row_filter out to read all'
            )
        return row_filter

    @field_validator("exclude")
    @classmethod
    def _name_rows(cls, exclude: list[str]) -> list[str]:
        if any(not each.strip() for each in exclude):
            raise ValueError(
                f"expected rows to leave out, such as \"lang = 'en'\", found a blank exclusion in {exclude!r}: remove it"
            )
        return exclude

    @property
    def planned_filter(self) -> str:
        """The row filter as plans and legs record it: empty for all rows."""
        return self.row_filter or ""

    @property
    def label(self) -> str:
        """The source's name, for people."""
        return self.name or self.table

    @field_validator("columns")
    @classmethod
    def _distinct(cls, columns: list[str]) -> list[str]:
        if not columns or len(set(columns)) != len(columns):
            raise ValueError(f"expected one or more distinct column names, found {columns!r}")
        return columns


class OrderSpec(spec_problems.Section):
    """Settings that determine the order of rows. The leg binds them."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the order and of the ranks' random number generators."""
    batch_size: int = Field(ge=1, le=2**24)
    """Samples in one global batch (B), over all ranks."""
    key_groups: int = Field(default=16, ge=1, le=65_536)
    """Virtual readers (G, max_parallelism). Fixed for the run. G divides B."""
    block_slices: int = Field(default=4, ge=1, le=65_536)
    """Slices that a key group shuffles together (S)."""
    shuffle: bool = True
    """Shuffle units and rows. False: the order of the table."""
    passes: int = Field(default=1, ge=1, le=1_000_000)
    """Passes over the plan before the run is finished."""
    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Greatest number of optimizer steps of the run. Unset: no bound."""

    @model_validator(mode="after")
    def _divides(self) -> OrderSpec:
        if self.batch_size % self.key_groups:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of key_groups {self.key_groups}: "
                "every key group gives the same number of samples to a batch"
            )
        return self


class SequenceSpec(spec_problems.Section):
    """Conversion of documents to sequences. Without a length every row is a sample."""

    length: int = Field(default=0, ge=0, le=2**24)
    """Tokens in a sequence (T). 0: rows are samples and are not packed."""
    column: str = ""
    """Column of text, or of lists of tokens, after the transform. Empty: the first column."""
    tokenizer: str = ""
    """For text: a tokenizer.json, beside the job file or from the working directory, or a transformers tokenizer by name."""
    begin_token: Annotated[int | str, spec_problems.name_or_number(0, 2**31 - 1)] = ""
    """Token to put before each document: its text, or its number. Empty: none."""
    end_token: Annotated[int | str, spec_problems.name_or_number(0, 2**31 - 1)] = ""
    """Token to put after each document: its text, or its number. Empty: none."""
    pad_id: int = Field(default=0, ge=0, lt=2**31)
    """Token that fills the last sequences of a run."""


class ReadSpec(spec_problems.Section):
    """Reading of each rank. It does not change which rows are read."""

    threads: int = Field(default=2, ge=1, le=1024)
    """Threads of a rank that decode in advance."""
    budget_mb: int = Field(default=1024, ge=1, le=2**24)
    """Megabytes of decoded blocks that a rank may keep. The blocks that are being read must fit."""
    shares: Literal["each", "node"] = "each"
    """Which ranks of a replica of the model decode the share that they read. "each": all. "node": one on each node, whose memory
    the others map."""
    stages: Literal["ends", "all"] = "ends"
    """Stages of a pipeline that get values. "ends": the first and the last one, and batches of the others have no tensors."""


class CheckpointSpec(spec_problems.Section):
    """Moments and places of checkpoints."""

    store: str = ""
    """Folder of the checkpoints, or an address such as s3://bucket/path. Empty: the folder `local`, or checkpoints/ in the home
    folder."""
    store_properties: dict[str, str] = Field(default_factory=dict)
    """pyiceberg properties of the store, such as s3.endpoint, in addition to those of the lakehouse."""
    local: str = ""
    """Local folder in which ranks make checkpoints before they are copied to the store, and keep their logs. Empty: the store if
    it is a folder, or checkpoints/ in the home folder."""
    every_steps: Annotated[int | str, spec_problems.name_or_number(1, MOST_STEPS, ("auto",))] | None = None
    """Checkpoints are taken at multiples of this many optimizer steps. "auto": at the interval of least cost, from measured costs
    and failures. Unset: "auto", or none if every_s is set."""
    every_s: float = Field(default=0.0, ge=0, le=LONGEST_S)
    """Seconds of training between checkpoints. 0: only steps count. With every_steps the earlier one counts. With "auto": seconds
    of work that a failure may cost, if checkpoints are fast enough."""
    engine: Annotated[str, spec_problems.name_in(ENGINES, "engine", "auto", "torch")] = "auto"
    """Adapter that saves and loads the state: "torch", "dcp", "deepspeed", or one that another distribution has as an entry point
    of dlac.engines. "auto": chosen by the state that the script restores."""
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """"synchronous": training waits for the commit. "asynchronous": it waits only for the copy of the state."""
    memory: str = "/dev/shm" if sys.platform == "linux" else ""
    """Folder of shared memory in which a node keeps the newest states of its ranks and of another node's, so that a restart reads
    neither the store nor the disk. Empty: no such states."""
    memory_every_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Such states are kept after multiples of this many optimizer steps. 0: at the interval of least cost."""
    memory_point_s: float | None = Field(default=None, gt=0, le=LONGEST_S)
    """Seconds of work that a failure may cost at that interval, for at most 2 % of the time. Unset: 10, for at most 0.5 %."""
    memory_waits: bool = False
    """With several nodes: when such a state is due, training waits until the one before is copied to another node. False: the
    state is left out, so with a slow network a failure repeats more steps."""
    keep_last: int = Field(default=0, ge=0, le=1_000_000)
    """Newest checkpoints to keep. Older ones are retired. 0: all. With 2 or more a damaged one can be replaced."""
    keep_every_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Also keep the first checkpoint at or after each multiple of this many steps. 0: none."""

    @field_validator("memory")
    @classmethod
    def _is_absolute(cls, memory: str) -> str:
        if memory and not memory.startswith("/"):
            raise ValueError(f'expected the absolute path of a folder of shared memory, or "", found {memory!r}')
        return memory

    @field_validator("store", "local")
    @classmethod
    def _is_a_place(cls, place: str, info: ValidationInfo) -> str:
        if not place:
            return place
        return checked_address(place, known=()) if info.field_name == "local" else checked_address(place)

    @property
    def steps_between(self) -> int | None:
        """Optimizer steps at whose multiples checkpoints are taken. None: steps do not count."""
        return self.every_steps if isinstance(self.every_steps, int) else None

    @property
    def is_automatic(self) -> bool:
        """True if the interval between checkpoints is computed."""
        return self.every_steps == "auto" or (self.every_steps is None and not self.every_s)


class JobSpec(spec_problems.Section):
    """One training run."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[SerializeAsAny[ExtensionSection], BeforeValidator(read_section)]] = Field(
        init=False
    )
    """Sections of extensions by name."""
    run: str
    """Name of the run: letters, digits, dots, dashes and underscores."""
    source: SourceSpec
    """The source. In a mixture, the first of its sources."""
    mixture: list[SourceSpec] = Field(default_factory=list)
    """Further sources, mixed in by their weights."""
    sequences: SequenceSpec = SequenceSpec()
    """Conversion of documents to sequences."""
    read: ReadSpec = ReadSpec()
    """Reading of each rank."""
    order: OrderSpec
    """Settings that determine the order of rows."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Moments and places of checkpoints."""
    launch: LaunchSpec
    """Start and supervision of the ranks."""
    lakehouse: LakehouseConfig = LakehouseConfig()
    """Address of the lakehouse."""
    params: dict[str, str] = Field(default_factory=dict)
    """Settings that the training script reads itself."""

    @model_validator(mode="before")
    @classmethod
    def _is_prepared(cls, raw: Any) -> Any:
        note_secrets(raw)
        if not isinstance(raw, dict):
            return raw
        return {
            name: value if name in cls.model_fields or not isinstance(name, str) else UnreadSection(name, value)
            for name, value in raw.items()
        }

    @classmethod
    def known_fields(cls) -> dict[str, FieldInfo]:
        """Return all fields by name, with the sections of installed extensions."""
        models, names = section_classes(), SECTIONS.points().keys() - cls.model_fields.keys()
        return {**cls.model_fields, **{name: FieldInfo(annotation=models.get(name)) for name in sorted(names)}}

    @property
    def sections(self) -> dict[str, ExtensionSection]:
        """The sections of extensions that stand in the spec, by name."""
        return self.__pydantic_extra__ or {}

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return an extension's section, or its defaults if the spec has no such table."""
        return next((each for each in self.sections.values() if isinstance(each, kind)), None) or kind()

    def event_receiver(self, *, launched_by: str = "", is_command: bool = False) -> EventReceiver | None:
        """Return the receiver of a launch's events, or of those of a command, of the first section that has one."""
        made = (
            each.event_receiver(self, launched_by=launched_by, is_command=is_command) for each in self.sections.values()
        )
        return next(filter(None, made), None)

    @field_validator("run")
    @classmethod
    def _named(cls, run: str) -> str:
        try:
            return check_run_name(run)
        except SpecInvalid as err:
            raise ValueError(str(err)) from err

    @model_validator(mode="after")
    def _ranks_divide(self) -> JobSpec:
        if self.launch.replicas and self.launch.world_size > self.order.batch_size:
            raise ValueError(
                f"expected at most {self.order.batch_size} ranks of replica groups, one for each sample of a batch, found "
                f"{self.launch.world_size} ({self.launch.replicas} groups of {self.launch.ranks_per_replica}): choose fewer"
            )
        if self.launch.replicas:
            return self
        mesh, ranks = self.launch.mesh, self.launch.world_size
        if not self.launch.nodes and not mesh.divides(ranks):
            experts = f", and ranks of a stage that are a multiple of ep = {mesh.ep}" if mesh.ep > 1 else ""
            raise ValueError(
                f"expected launch.world_size to be a multiple of tp * pp * cp = {mesh.replica_ranks}{experts}, found {ranks}: "
                "correct it, or launch.mesh"
            )
        if not self.launch.nodes and self.order.batch_size % mesh.readers(ranks):
            shared = f" / {mesh.replica_ranks} ranks of a replica" if mesh.replica_ranks > 1 else ""
            raise ValueError(
                f"batch_size {self.order.batch_size} is not a multiple of world_size {ranks}{shared}: every rank works on the "
                "same number of samples"
            )
        return self

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """All sources, in the order in which the ledger numbers them."""
        return (self.source, *self.mixture)

    def with_sources(self, sources: Sequence[SourceSpec]) -> JobSpec:
        """Return this spec with other sources, in the order of `sources`."""
        return self.model_copy(update={"source": sources[0], "mixture": list(sources[1:])})

    @model_validator(mode="after")
    def _mixes(self) -> JobSpec:
        labels = [source.label for source in self.sources]
        if len(set(labels)) != len(labels):
            raise ValueError(f"expected sources with different names, found {labels!r}: name them")
        if len({source.follow for source in self.sources}) > 1:
            raise ValueError('expected sources that all follow their table, or none, found both: set the same "follow"')
        if self.order.steps is None and all(self.passes_of(source) == 0 for source in self.sources):
            raise ValueError("expected order.steps, for no source ever ends, found none: set it, or passes of a source")
        late = [source for source in self.sources if source.place == "late"]
        if late and (len(late) == len(self.sources) or late[0].follows or not all(map(self.passes_of, self.sources))):
            raise ValueError(
                'expected place = "late" beside a mixed source, and sources that end (passes above 0, follow = "pinned"), '
                f"found it for {[source.label for source in late]!r} of {labels!r}: leave it out, or set passes"
            )
        return self

    @model_validator(mode="after")
    def _streams(self) -> JobSpec:
        """Check that a leg can be switched in place."""
        conditions = {
            "launch.replicas": self.launch.replicas,
            'launch.on_skipped = "replay"': self.launch.on_skipped == "replay",
        }
        found = [name for name, holds in conditions.items() if holds]
        if self.streams and found:
            raise ValueError(
                f'expected follow = "stream" without {found[0]}, found both: leave it out, or set follow = "appends"'
            )
        return self

    @model_validator(mode="after")
    def _replays(self) -> JobSpec:
        """Check that steps can be replayed: their rows follow from the step, and the passes end."""
        conditions = {
            "sequences.length": self.sequences.length,
            "a transform": any(source.transform for source in self.sources),
            "launch.replicas": self.launch.replicas,
            'launch.on_spike = "exclude"': self.launch.on_spike == "exclude",
            "sources without end (passes = 0)": not any(map(self.passes_of, self.sources)),
        }
        found = [name for name, holds in conditions.items() if holds]
        if self.launch.on_skipped == "replay" and found:
            raise ValueError(
                f'expected launch.on_skipped = "replay" without {found[0]}, found both: set launch.on_skipped = "count"'
            )
        return self

    @property
    def streams(self) -> bool:
        """True if the run waits for rows that are appended to its tables."""
        return self.source.follow == "stream"

    @property
    def own_tables(self) -> tuple[str, ...]:
        """The source tables in the lakehouse's own catalog."""
        return tuple(source.table for source in self.sources if ":" not in source.table)

    def passes_of(self, source: SourceSpec) -> int:
        """Return the passes over a source. 0: without end."""
        return self.order.passes if source.passes is None else source.passes

    def resolved(self, home: Path) -> JobSpec:
        """This spec with the embedded lakehouse and store of `home` where none is named.

        Raises `SpecInvalid` if `home` is no folder.
        """
        home = checked_home(home)
        made_in = self.checkpoint.local or (str(home / "checkpoints") if "://" in self.checkpoint.store else "")
        store = self.checkpoint.store or made_in or str(home / "checkpoints")
        if "://" not in store:
            store = str(Path(store).resolve())
        places = {"store": store, "local": str(Path(made_in or store).resolve())}
        checkpoint = self.checkpoint.model_copy(update=places)
        return self.model_copy(update={"lakehouse": self.lakehouse.at_home(home), "checkpoint": checkpoint})


def full_spec() -> type[JobSpec]:
    """Return the job spec with the sections of all installed extensions as fields, for a schema and a reference."""
    fields: dict[str, Any] = {}
    for name, model in section_classes().items():
        owner: dict[str, Any] = {"x-extension": SECTIONS.points()[name].module.rpartition(".")[0]}
        fields[name] = (model, Field(default=model(), description=model.__doc__, json_schema_extra=owner))
    full: type[JobSpec] = create_model("JobSpec", __base__=JobSpec, __doc__=JobSpec.__doc__, **fields)
    return full


def parse_spec(raw: dict[str, Any], *, origin: str) -> JobSpec:
    """Return a validated spec from plain data. Raise `SpecInvalid` with every wrong field, what was expected and found."""
    return spec_problems.validate(JobSpec, raw, invalid=f"{origin} is not a valid job spec")


def parse_recorded(raw: Any, *, origin: str) -> JobSpec:
    """Parse a spec that DLAC recorded, in a file that may be damaged. Raises as `parse_spec`."""
    if not isinstance(raw, dict):
        raise SpecInvalid(f"expected a table of settings in {origin}, found {type(raw).__name__}")
    return parse_spec(raw, origin=origin)


def read_spec(path: Path, *, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Return a validated spec from a .toml, .yaml or .yml file. Paths of its script and of a tokenizer beside it become absolute.

    `overrides` are settings by their names in the file, such as `launch.world_size`, in place of the file's.

    Raises `SpecInvalid` if the file cannot be read, or a field is wrong.
    """
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    parser = parsers.get(path.suffix)
    if parser is None:
        raise SpecInvalid(f"expected a .toml, .yaml or .yml file, found {str(path)!r}")
    try:
        raw = parser(path.read_text())
    except yaml.YAMLError as err:  # its text quotes the line, which may have a password
        at = getattr(err, "problem_mark", None)
        where = "" if at is None else f" in line {at.line + 1}, column {at.column + 1}"
        reason = getattr(err, "problem", None) or type(err).__name__
        raise SpecInvalid(f"cannot read the job spec {str(path)!r}: {reason}{where}") from None
    except FileNotFoundError as err:
        raise SpecInvalid(
            f"cannot read the job spec {str(path)!r}: no such file; correct the path, or write one with `dlac init`"
        ) from err
    except (OSError, ValueError, RecursionError) as err:  # of a number of thousands of digits as well
        raise SpecInvalid(f"cannot read the job spec {str(path)!r}: {err}") from err
    if not isinstance(raw, dict):
        raise SpecInvalid(f"expected a table of settings in {str(path)!r}, found {type(raw).__name__}")
    if _is_too_large(raw):
        raise SpecInvalid(
            f"expected at most {_MOST_VALUES:,} values in the job spec {str(path)!r}, found more, or aliases in a circle: "
            "write the settings out"
        )
    return spec_of_file(raw, folder=path.parent, origin=repr(str(path)), overrides=overrides or {})


def _is_too_large(raw: object) -> bool:
    """Return True if a spec has too many values. A few lines of YAML have any number of them, by aliases."""
    left, count = [raw], 0
    while left and count <= _MOST_VALUES:
        value, count = left.pop(), count + 1
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return count > _MOST_VALUES


def spec_of_file(raw: dict[str, Any], *, folder: Path, origin: str, overrides: Mapping[str, Any]) -> JobSpec:
    """Return a validated spec from the settings of a file in `folder`, with some overridden. Raises as `parse_spec`."""
    for name, value in overrides.items():
        *sections, last = name.split(".")
        place: Any = raw
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise SpecInvalid(f"expected the name of a setting such as 'launch.world_size', found {name!r} to override")
        place[last] = value
    spec = parse_spec(raw, origin=origin)
    changed: dict[str, Any] = {"script": str((folder / spec.launch.script).resolve())}
    found: dict[str, Any] = {"launch": spec.launch.model_copy(update=changed)}
    if spec.sequences.tokenizer and (file := folder / spec.sequences.tokenizer).is_file():
        found["sequences"] = spec.sequences.model_copy(update={"tokenizer": str(file.resolve())})
    return spec.model_copy(update=found)
