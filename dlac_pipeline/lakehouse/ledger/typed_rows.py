"""Rows of the ledger: one frozen dataclass for each kind of row, made when the table is read (`arrow_rows`).

In: rows of the table `consumption`. Out: `LedgerRow`s. A field is a column of the same name, or a field of the struct column of
the row's kind. `to_columns` returns a row as the table has it. Times are UTC, names that end in `_s` are seconds.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from dlac_pipeline.lakehouse.errors import LedgerError

Columns = dict[str, Any]
"""A row of the table `consumption`, by column."""
Purpose = Literal["adopts", "rewinds", "forks"]
"""Purpose of a claim whose attempt trains nothing."""
KINDS: "dict[str, type[LedgerRow]]" = {}
"""Kind in the table -> its class. `OtherRow` has the empty kind."""
NODES = "nodes"
"""Reason of an attempt that exits to make room for more nodes. It has no deadline, so this is no notice."""
_NOT_COMMITTED = datetime.fromtimestamp(0, UTC)


def _listed(of: Callable[..., object]) -> Any:
    """Return a field that is a list of structs in the table. Each is read as the arguments of `of`.

    An empty list is not a null, because pyiceberg reads the null as an empty list.
    """
    return field(default=(), metadata={"read": lambda found: [of(**each) for each in found] or ()})


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """Common part of all rows. The commit of a row sets these fields."""

    kind: ClassVar[str] = ""
    run: str = ""
    seq: int = 0
    """Number of the append in its run, from 1. Rows of one append have the same number. 0: not committed."""
    attempt: int = 0
    nonce: str = ""
    head_after: str | None = None
    committed_at: datetime = _NOT_COMMITTED
    format_version: int = 0

    def __init_subclass__(cls, kind: str | None = None) -> None:
        cls.kind = cls.kind if kind is None else kind
        KINDS[cls.kind] = cls  # the decorator makes a class with slots from the first one, and replaces it here

    def to_columns(self) -> Columns:
        """Return the row as the table has it."""
        columns: Columns = {"kind": self.kind}
        for each in columns_of(type(self)):
            value = _to_arrow(getattr(self, each.name))
            if each.inner is None:
                columns[each.column] = value
            elif value not in (None, "", {}) and (value != [] or each.read is not None):
                columns.setdefault(each.column, {})[each.inner] = value
        return columns


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRanks:
    """Consecutive ranks on one node."""

    node: str
    ranks: int
    """Number of the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow(LedgerRow, kind="checkpoint"):
    """A committed checkpoint, which becomes the head."""

    checkpoint_id: str = ""
    parent: str | None = None
    step: int = 0
    leg: int = 0
    world_size: int = 0
    """Processes that took it."""
    readers: int = 0
    """Number of shares in which they read the batches, a divisor of `world_size`. 0: one each."""
    stages: int = 0
    """Number of stages of a pipeline, over which the ranks of a share are distributed. 0: one."""
    manifest_uri: str = ""
    manifest_digest: str = ""
    model_digest: str = ""
    applied_steps: int = 0
    """Steps since the parent that changed the model."""
    skipped_steps: int = 0
    losses: Sequence[float] = ()
    """Global loss of each step since the parent."""
    bytes: int | None = None
    """Size of its files. None in rows that do not record it."""
    phases: Mapping[str, float] = field(default_factory=dict, metadata={"read": dict})
    """Seconds of each phase, of the slowest rank. Without the commit itself."""
    nodes: Sequence[str] = ()
    """Nodes with local copies. Only the first checkpoint of an attempt records them."""
    rank_nodes: Sequence[NodeRanks] = _listed(NodeRanks)
    """Nodes of the ranks in order, each with its number of ranks. Only the first checkpoint of an attempt records them."""
    reason: str | None = None
    interval_s: float | None = None
    why: str | None = None
    """Reason for the interval."""
    total_steps: int | None = None
    """Last step of the run, where it is known."""
    adopted: str | None = None
    """Place of the foreign checkpoint that it was made from."""
    refers_to: Sequence[str] = ()
    """Names of earlier checkpoints, in whose folders some of its files are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvanceRow(LedgerRow, kind="advance"):
    """Part of a block that a checkpoint consumed: positions [position_start, position_end), all applied or none.

    It is the one record of consumption, from the tracker to the ledger. With `token_end` the last row was read only up to it.
    With `token_start` the first row was read from it on.
    """

    checkpoint_id: str = ""
    leg: int = 0
    step: int = 0
    """Step of the checkpoint."""
    plan_id: str = ""
    cut_id: str = ""
    source: int = 0
    pass_index: int = field(default=0, metadata={"column": "pass"})
    key_group: int = 0
    block: int = 0
    position_start: int = 0
    position_end: int = 0
    first_step: int = 0
    last_step: int = 0
    rows_consumed: int = 0
    applied: bool = True
    token_start: int | None = None
    token_end: int | None = None
    filtered: Sequence[int] = ()
    """Positions that the transform left out."""
    quarantined: Sequence[int] = ()
    """Positions of rows that were rejected."""
    quarantine_reasons: Sequence[str] = ()
    """Reason for each rejection."""

    @property
    def rows_dead(self) -> int:
        """Rows passed over because they are not live."""
        span = self.position_end - self.position_start - (self.token_end is not None)
        return span - self.rows_consumed - len(self.filtered) - len(self.quarantined)

    def to_columns(self) -> Columns:
        """Return the row as the table has it."""
        columns = LedgerRow.to_columns(self)
        return {
            **columns,
            "rows_dead": self.rows_dead,
            "rows_filtered": len(self.filtered),
            "rows_quarantined": len(self.quarantined),
            **{name: columns[name] or None for name in ("filtered", "quarantined", "quarantine_reasons")},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRow(AdvanceRow, kind="replay"):
    """Part of a block that a step read again, as an advance of a skipped step has it. It moves no cursor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSnapshot:
    """A snapshot of a source table that an attempt reads."""

    table_uuid: str
    snapshot_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRow(LedgerRow, kind="claim"):
    """The claim of a run by an attempt."""

    replaces: int = 0
    """The attempt that was current before."""
    purpose: Purpose | None = None
    """Purpose of an attempt that trains nothing. None: it trains."""
    origin: str | None = None
    """The adopted place, or the id of the checkpoint to rewind to or to fork."""
    host: str = ""
    """Node that claimed the run."""
    local: str = ""
    """Local folder of checkpoints on that node."""
    store: str = ""
    """Address of the run's folder in the store."""
    marks_commits: bool = False
    """True if the attempt writes a commit mark after each commit."""
    launch_folder: str = ""
    rendezvous: str = ""
    launched_by: str = ""
    """Run of the orchestrator that launched the attempt."""
    memory_of: int = 0
    """The attempt whose memory state this one resumes from, or 0. The state continues the head."""
    memory_step: int = 0
    """Step of that state."""
    memory_ranks: int = 0
    """Ranks that trained up to it."""
    memory_readers: int = 0
    memory_stages: int = 0
    """Number of shares in which these read the batches. 0: one each."""
    memory_at: float = 0.0
    """Time at which they kept it, in seconds since the epoch."""
    memory_rows: int = 0
    """Rows that they had worked on by then in that attempt."""
    plan_ids: Sequence[str] = ()
    """The newest plan of each source."""
    leg_plan_ids: Sequence[str] = ()
    """All plans of the leg."""
    planned: Sequence[PlannedSnapshot] = _listed(PlannedSnapshot)

    @property
    def trains(self) -> bool:
        """False if the attempt only adopts, rewinds or forks. Such an attempt neither makes progress nor fails."""
        return self.purpose is None


@dataclass(frozen=True, kw_only=True, slots=True)
class LegRow(LedgerRow, kind="leg"):
    """A new leg, in the append of its first checkpoint."""

    checkpoint_id: str = ""
    leg: int = 0
    step: int = 0

    leg_json: str = "{}"
    """The leg as its manifest has it: a document with a separate version."""

    @property
    def record(self) -> Mapping[str, Any]:
        """The leg, as `Leg.from_record` reads it. Raises `LedgerError` if it is damaged."""
        try:
            return dict(json.loads(self.leg_json))
        except (ValueError, TypeError) as err:
            raise LedgerError(
                f"expected a leg in the column leg_json of run {self.run!r} at seq {self.seq}, found {self.leg_json!r:.200} "
                f"({type(err).__name__}: {err}): restore the ledger table"
            ) from err


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedCheckpointRow(LedgerRow, kind="quarantine"):
    """A damaged checkpoint. The head steps back to `head_after`."""

    checkpoint_id: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedRowsRow(LedgerRow, kind="quarantined_rows"):
    """Rows that a new leg leaves out: a row group that does not decode, or rows at which ranks died."""

    leg: int = 0
    source: int = 0
    path: str = ""
    row_group: int = 0
    rows: int = 0
    """Live rows among them."""
    reason: str = ""
    positions: Sequence[int] = ()
    """Positions of the rows in the data file. Empty: the whole row group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipRow(LedgerRow, kind="membership"):
    """The replica groups that took part in the steps from `first_step` on, in the append of the next checkpoint."""

    checkpoint_id: str = ""
    leg: int = 0
    first_step: int = 0
    groups: Sequence[int] = ()
    """Numbers of the groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetireRow(LedgerRow, kind="retire"):
    """A checkpoint that is never restored again. Its files are removed."""

    checkpoint_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NameRow(LedgerRow, kind="name"):
    """A name of a checkpoint. Without a checkpoint the name is removed."""

    checkpoint_id: str | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRow(LedgerRow, kind="export"):
    """A file of weights that was made from a checkpoint."""

    checkpoint_id: str = ""
    digest: str = ""
    bytes: int = 0
    file: str = ""
    part: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyRow(LedgerRow, kind="verify"):
    """The result of a verification of a checkpoint."""

    checkpoint_id: str = ""
    verification: str = ""
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Rows that a branch leaves out: rows of a source for which a filter is true."""

    source: int
    """Number of the source in the job spec, from 0."""
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindRow(LedgerRow, kind="rewind"):
    """A step of the head back to a checkpoint, at which a branch begins."""

    checkpoint_id: str | None = None
    """The new head. None: the run is at its beginning."""
    step: int = 0
    left_checkpoint: str | None = None
    """The head before."""
    left_step: int = 0
    exclude: Sequence[Exclusion] = _listed(Exclusion)
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkRow(LedgerRow, kind="fork"):
    """The parent of a forked run, in the append of its first checkpoint."""

    checkpoint_id: str = ""
    """The first checkpoint of this run."""
    step: int = 0
    parent_run: str = ""
    parent_checkpoint: str = ""
    parent_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishRow(LedgerRow, kind="finish"):
    """The end of a run."""

    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRow(LedgerRow):
    """A row of a kind that this version does not know."""

    columns: Columns = field(default_factory=dict)
    """All its columns."""

    def to_columns(self) -> Columns:
        """Return the row as the table has it."""
        return dict(self.columns)


HEAD_KINDS = tuple(kind for kind in KINDS.values() if not issubclass(kind, AdvanceRow | OtherRow))
"""Every kind but advances and replays: the state of a run, without its consumption."""


class ColumnOf(NamedTuple):
    """The place of a field in the table."""

    name: str
    """Name of the field."""
    column: str
    inner: str | None
    """Field of a struct column, or None: the whole column."""
    default: Any
    read: Callable[[Any], Any] | None
    """Conversion of a value that Arrow has in another form."""


def columns_of(kind: type[LedgerRow]) -> list[ColumnOf]:
    """Return the places of a class's fields: a column of their name, or the struct column of the kind."""
    return _columns()[kind]


@cache
def _columns() -> dict[type[LedgerRow], list[ColumnOf]]:
    # It takes long to import, and `dlac --help` needs no row.
    from dlac_pipeline.lakehouse.ledger.schemas import CONSUMPTION

    known = {each.name for each in CONSUMPTION.fields}
    return {kind: [_place_of(each, kind, known) for each in fields(kind)] for kind in KINDS.values()}


def _place_of(each: Field[Any], kind: type[LedgerRow], known: Collection[str]) -> ColumnOf:
    column: str = each.metadata.get("column", each.name)
    outer, inner = (column, None) if column in known else (kind.kind, each.name)
    default, read = getattr(kind(), each.name), each.metadata.get("read")
    return ColumnOf(name=each.name, column=outer, inner=inner, default=default, read=read)


def repeatable(rows: Iterable[LedgerRow]) -> list[Columns]:
    """Return rows as a manifest repeats them, without values that only the commit of a row decides."""
    return [_repeatable(row) for row in rows]


def _repeatable(row: LedgerRow) -> Columns:
    set_by_manifest = {"run", "committed_at", "format_version", "manifest_uri", "manifest_digest", "model_digest"}
    left_out = set_by_manifest if row.seq else set_by_manifest | {each.name for each in fields(LedgerRow)}
    return {name: value for name, value in row.to_columns().items() if value is not None and name not in left_out}


def _to_arrow(value: Any) -> Any:
    """Return the value of a field as Arrow accepts it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # a message may have half of a surrogate pair
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return [asdict(each) if hasattr(each, "__dataclass_fields__") else _to_arrow(each) for each in value]
    return value
