"""Leg that a job spec requests: the first one of a run, the committed one again, or an intended new one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, ListType, LongType, StringType

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import NoSuchColumn, ResumeMismatch, SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.row_groups import NO_CHECKS, ColumnChecks
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table, snapshot_of
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.plan.legs.leg import ORDER_SETTINGS, Leg, LegSequences, LegSource
from dlac_pipeline.plan.plan import Plan
from dlac_pipeline.plan.planner import check_source, make_plan
from dlac_pipeline.plan.source_order import SourceStart
from dlac_pipeline.rows.columns import ColumnKind, kinds_of
from dlac_pipeline.rows.transform import load_transform
from dlac_pipeline.spec.job_spec import JobSpec, SequenceSpec, SourceSpec

TOKENIZERS = Door("dlac.tokenizers", "tokenizer library")
_PLANNED = ("table_uuid", "snapshot_id", "schema_id", "plan_id")
"""Fields of a plan's row that a leg binds."""
Progress = Callable[[int, int, int], None]
"""Callback for progress: the place of the source, its data files whose footers are read, and all its data files."""


class LegTokenizer(Protocol):
    """A tokenizer of `sequences.tokenizer`, of an extension, for the packing of that extension."""

    @property
    def digest(self) -> str:
        """Return the digest that a leg binds. It identifies the tokens of every text."""

    def token_id(self, token: str) -> int:
        """Return the number of a token by its text. Raise `TokenizerUnreadable` if there is no such token."""


def open_tokenizer(name: str) -> LegTokenizer:
    """Return the tokenizer of a file or of a name. Raise `TokenizerUnreadable`, or `BadInput` if no extension loads one."""
    found: LegTokenizer = TOKENIZERS.load("fast", setting="sequences.tokenizer")(name)
    return found


def plan_sources(
    lakehouse: Lakehouse, spec: JobSpec, *, progress: Progress = lambda source, done, total: None
) -> tuple[Plan, ...]:
    """Plan each source of a new run, or find its plan. Raises as `check_readable`, which is called first, and `make_plan`."""
    check_readable(lakehouse, spec)
    return tuple(
        make_plan(lakehouse, source, progress=partial(progress, place), checks=_checks_of(spec, source))
        for place, source in enumerate(spec.sources)
    )


def _checks_of(spec: JobSpec, source: SourceSpec) -> ColumnChecks:
    """Return the columns whose content would surely end the run: none if not all rows are read, or a transform gets them."""
    ends_before = spec.order.steps is not None or source.follows or not spec.passes_of(source)
    if ends_before or source.transform:
        return NO_CHECKS
    if spec.sequences.length:
        return ColumnChecks(without_nulls=[spec.sequences.column or source.columns[0]])
    whole = [name for name in source.columns if name not in source.nullable]
    return ColumnChecks(without_nulls=whole, of_one_length=[name for name in whole if name not in source.ragged])


def first_leg(spec: JobSpec, plans: Sequence[Plan]) -> Leg:
    """The leg that a run starts with, given the plan of each source."""
    key_groups = spec.order.key_groups
    sources = [
        LegSource(
            **_bound_of(spec, source),
            **{name: getattr(plan.row, name) for name in _PLANNED},
            start=SourceStart.fresh(key_groups, [(plan.row.plan_id, _passes(spec, source))]),
        )
        for source, plan in zip(spec.sources, plans, strict=True)
    ]
    return Leg(index=0, start_step=0, sources=tuple(sources), **_settings(spec))


def check_readable(lakehouse: Lakehouse, spec: JobSpec) -> None:
    """Raise `BadInput` for what prevents reading the sources, except their rows, before anything is pinned or written."""
    check_tokens(spec.sequences)
    sequences_of(spec.sequences, spec.source)
    if spec.sequences.tokenizer and not spec.sequences.length:
        # a wrong path is a mistake, although rows are samples and the tokenizer is not used
        open_tokenizer(spec.sequences.tokenizer)
    known: dict[str, dict[str, ColumnKind]] = {}
    for source in spec.sources:
        table = load_version(lakehouse, source.table, source.snapshot_id)
        schema = check_source(table, source, snapshot_of(table, source.snapshot_id, ref=source.ref))
        if source.transform:
            continue
        if spec.sequences.length:
            _check_documents(schema, source, spec.sequences)
        else:
            known[source.label] = kinds_of(schema, source.columns, source.ragged, source.nullable)
    check_alike(known)


def check_tokens(sequences: SequenceSpec) -> None:
    """Raise `SpecInvalid` if tokens are named by text without a tokenizer, which alone knows their numbers."""
    for name in ("begin", "end"):
        token = getattr(sequences, f"{name}_token")
        if isinstance(token, str) and token and not sequences.tokenizer:
            raise SpecInvalid(
                f"expected sequences.tokenizer beside {name}_token, found {name}_token {token!r} without one: name a "
                "tokenizer.json, or give the number of the token"
            )


def check_alike(known: Mapping[str, Mapping[str, ColumnKind]]) -> None:
    """Raise `UnsupportedColumn` unless the columns of all sources (label -> columns) fit into one batch."""
    first, *others = known or [""]
    for label in others:
        if known[label] != known[first]:
            raise UnsupportedColumn(
                f"expected the same columns from all sources, found {list(known[first].values())!r} from "
                f"{first!r} and {list(known[label].values())!r} from {label!r}: choose columns of one "
                "name and type, or let a transform return the same columns for all sources"
            )


def _check_documents(schema: Schema, source: SourceSpec, sequences: SequenceSpec) -> None:
    name = sequences.column or source.columns[0]
    if name not in source.columns:
        raise NoSuchColumn.of(f"sequences.column, of source {source.label!r}", name, source.columns)
    kind = schema.find_field(name).field_type
    items = kind.element_type if isinstance(kind, ListType) else None
    if isinstance(kind, StringType) and not sequences.tokenizer:
        raise SpecInvalid(
            f"expected sequences.tokenizer for the texts in column {name!r} of source {source.label!r}, found none: name a "
            "tokenizer.json"
        )
    if not isinstance(kind, StringType) and not isinstance(items, IntegerType | LongType):
        raise UnsupportedColumn(
            f"expected column {name!r} of source {source.label!r} to hold texts or lists of integers, found {kind}: name "
            "another sequences.column, or convert it in a transform"
        )


def check_sources(spec: JobSpec, leg: Leg) -> None:
    """Raise `ResumeMismatch` unless the spec has as many sources as the leg: their place identifies them."""
    if len(spec.sources) != len(leg.sources):
        raise ResumeMismatch(
            f"expected {len(leg.sources)} sources, as leg {leg.index} of run {spec.run!r} binds, found {len(spec.sources)} in "
            "the job spec: name the one that the run was trained with, or begin another run (`dlac fork` keeps the history)"
        )


def check_same_tables(leg: Leg, table_uuids: Mapping[str, str]) -> None:
    """Raise `TableReplaced` if a table of the leg was dropped and created again. `table_uuids` lacks tables that are gone."""
    for mine in leg.sources:
        check_same_table(mine.table, planned_uuid=mine.table_uuid, uuid=table_uuids.get(mine.table, mine.table_uuid))


def requested_leg(spec: JobSpec, leg: Leg, table_uuids: Mapping[str, str]) -> Leg:
    """Return the leg that the spec requests where `leg` is committed: an equal record if no bound setting changes.

    A table counts by its uuid, under any name: `table_uuids` has that of each table of the spec.
    """
    known: list[LegSource | None] = [*leg.sources, *[None] * (len(spec.sources) - len(leg.sources))]
    sources = []
    for source, mine in zip(spec.sources, known, strict=False):
        start = mine.start if mine else SourceStart.fresh(spec.order.key_groups, [])
        snapshot = None if source.follows else source.snapshot_id
        planned: dict[str, Any] = {
            "table_uuid": table_uuids.get(source.table, f"(no table {source.table})"),
            "snapshot_id": (mine.snapshot_id if mine else 0) if snapshot is None else snapshot,
            "schema_id": mine.schema_id if mine else 0,
            "plan_id": mine.plan_id if mine else "",
        }
        active = mine.active if mine else True
        sources.append(LegSource(**_bound_of(spec, source), **planned, active=active, start=start))
    return replace(leg, sources=tuple(sources), **_settings(spec))


def _bound_of(spec: JobSpec, source: SourceSpec) -> dict[str, Any]:
    same = ("table", "weight", "on_reject", "place")
    lists = ("columns", "exclude", "identity_columns", "nullable", "ragged")
    return {
        **{name: getattr(source, name) for name in same},
        **{name: tuple(getattr(source, name)) for name in lists},
        "name": source.label,
        "row_filter": source.planned_filter,
        "passes": _passes(spec, source),
        "follow": "appends" if source.follows else "pinned",  # the order is the same if it streams
        "transform": load_transform(source.transform).digest if source.transform else "",
    }


def _passes(spec: JobSpec, source: SourceSpec) -> int:
    return 1 if source.follows else spec.passes_of(source)


def _settings(spec: JobSpec) -> dict[str, Any]:
    bound = {name: getattr(spec.order, name) for name in ORDER_SETTINGS}
    return {**bound, "sequences": sequences_of(spec.sequences, spec.source)}


def sequences_of(spec: SequenceSpec, first: SourceSpec) -> LegSequences:
    """Return how documents become sequences, with tokens by number. Raises `TokenizerUnreadable`."""
    if not spec.length:
        return LegSequences()
    tokenizer = open_tokenizer(spec.tokenizer) if spec.tokenizer else None

    def number(token: int | str) -> int | None:
        if isinstance(token, int):
            return token
        return tokenizer.token_id(token) if token and tokenizer else None

    return LegSequences(
        length=spec.length,
        column=spec.column or first.columns[0],
        tokenizer=tokenizer.digest if tokenizer else "",
        begin_id=number(spec.begin_token),
        end_id=number(spec.end_token),
        pad_id=spec.pad_id,
    )
