"""Rows of the ledger: one frozen dataclass for each kind of row, parsed once when the table is read (`arrow_rows`).

In: rows of the table `consumption`. Out: `LedgerRow`s, whose fields have the names of the columns, and of the keys of the JSON in
the column `detail`. `to_columns` returns a row as the table has it. Times are UTC, names that end in `_s` are seconds.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dlac_pipeline.lakehouse.errors import LedgerError

Columns = dict[str, Any]
"""One row of the table `consumption`, by column."""
Purpose = Literal["adopts", "rewinds", "forks"]
"""Purpose of a claim whose attempt trains nothing."""
_PURPOSES: tuple[Purpose, ...] = ("adopts", "rewinds", "forks")
KINDS: "dict[str, type[LedgerRow]]" = {}
"""Kind in the table -> its class. The empty kind is that of `OtherRow`."""
_NOT_COMMITTED = datetime.fromtimestamp(0, UTC)
_FIELDS = {"pass": "pass_index", "quarantined": ""}
"""Columns whose fields have other names, or none. The positions in `quarantined` are those of the reasons in `detail`."""
_KEYS = {"left": "from", "left_step": "from_step"}
_KEYS |= {"parent_run": "run", "parent_checkpoint": "checkpoint_id", "parent_step": "step"}
_LEFT_OUT = ("manifest_uri", "manifest_digest", "model_digest", "committed_at", "format_version", "run")
"""Columns that only the commit of a row decides. Manifests leave them out."""
_SET_BY_COMMIT = (*_LEFT_OUT, "seq", "attempt", "nonce", "head_after")
"""Columns of which a row has no value before its commit."""
_EMPTY: tuple[object, ...] = (None, "", (), [], {})


class _Parsed:
    """A row that was read. The JSON in its column `detail` is parsed when a field of it is read for the first time.

    Most readers need no such field, and a damaged `detail` concerns only those that do.
    """

    __slots__ = ("_text",)
    _text: str | None

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Set the fields of `detail`, none of which is set before. Return the value of one."""
            kind = type(self)
            if name not in details_of(kind):
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
            values = self._parse()
            for each, default in details_of(kind).items():
                getattr(kind, each).__set__(self, values.get(each, default))
            return object.__getattribute__(self, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow(_Parsed):
    """Common part of all rows. The commit of a row sets these fields."""

    kind: ClassVar[str] = ""
    older_kinds: ClassVar[tuple[str, ...]] = ()
    """Other kinds that older versions wrote for such rows."""
    run: str = ""
    seq: int = 0
    """Number of the append in its run, from 1. Rows of one append have the same number. 0: not committed."""
    attempt: int = 0
    nonce: str = ""
    head_after: str | None = None
    committed_at: datetime = _NOT_COMMITTED
    format_version: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Values in `detail` that this version does not know."""

    def __init_subclass__(cls, kind: str | None = None) -> None:
        cls.kind = cls.kind if kind is None else kind
        KINDS[cls.kind] = cls  # the decorator makes a class with slots from the first one, and replaces it here

    def to_columns(self) -> Columns:
        """Return the row as the table has it."""
        text: str | None = getattr(self, "_text", None)
        if text is None and (detail := {**self._to_detail(), **self.more}):
            text = json.dumps(detail, sort_keys=True, separators=(",", ":"), default=asdict)
        values = {column: getattr(self, name) for column, name in columns_of(type(self)).items()}
        return {"kind": self.kind, **values, "detail": text}

    def _to_detail(self) -> dict[str, Any]:
        values = {_KEYS.get(name, name): getattr(self, name) for name in details_of(type(self)) if name != "more"}
        return {key: value for key, value in values.items() if value not in _EMPTY}

    def _parse(self) -> dict[str, Any]:
        text: str | None = getattr(self, "_text", None)
        try:
            detail = {} if text is None else dict(json.loads(text))
            return {**self._from_detail(detail), "more": detail}
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise LedgerError(
                f"expected JSON in the column detail of a row of kind {self.kind!r} of run {self.run!r} at seq {self.seq}, "
                f"found {text!r:.200} ({type(err).__name__}: {err}): restore the ledger table"
            ) from err

    @classmethod
    def _from_detail(cls, detail: dict[str, Any]) -> dict[str, Any]:
        """Take the known values out of the content of `detail`, and return them by the names of their fields."""
        return _take(cls, detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow(LedgerRow, kind="checkpoint"):
    """A committed checkpoint, which becomes the head."""

    checkpoint_id: str = ""
    parent: str | None = None
    step: int = 0
    leg: int = 0
    world_size: int = 0
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
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase, of the slowest rank. Without the commit itself."""
    nodes: Sequence[str] = ()
    """Nodes with local copies. Only the first checkpoint of an attempt records them."""
    rank_nodes: Sequence[tuple[str, int]] = ()
    """Nodes of the ranks in order, each with its number of ranks. Only the first checkpoint of an attempt records them."""
    reason: str | None = None
    interval_s: float | None = None
    why: str | None = None
    """Reason for the interval."""
    total_steps: int | None = None
    """Last step of the run, where it is known."""
    adopted: str | None = None
    """Place of the foreign checkpoint that it was made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvanceRow(LedgerRow, kind="advance"):
    """One block's part of what a checkpoint consumed: positions [position_start, position_end), all applied or none.

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
    pass_index: int = 0
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
    quarantined: tuple[tuple[int, str], ...] = ()
    """Positions of rows that were rejected, and why."""

    @property
    def rows_dead(self) -> int:
        """Rows passed over because they are not live."""
        span = self.position_end - self.position_start - (self.token_end is not None)
        return span - self.rows_consumed - len(self.filtered) - len(self.quarantined)

    def to_columns(self) -> Columns:
        """Return the row as the table has it."""
        columns = LedgerRow.to_columns(self)
        positions = [position for position, _ in self.quarantined]
        return {
            **columns,
            "rows_dead": self.rows_dead,
            "rows_filtered": len(self.filtered),
            "rows_quarantined": len(positions),
            "filtered": list(self.filtered) or None,
            "quarantined": positions or None,
        }

    def _to_detail(self) -> dict[str, Any]:
        return {"quarantined": dict(self.quarantined)} if self.quarantined else {}


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
    origin: Any = None
    """The adopted place, the id of the checkpoint to rewind to, or the forked run with its checkpoint and step."""
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
    memory_at: float = 0.0
    """Time at which they kept it, in seconds since the epoch."""
    memory_rows: int = 0
    """Rows that they had worked on by then in that attempt."""
    plan_ids: Sequence[str] = ()
    """The newest plan of each source."""
    leg_plan_ids: Sequence[str] = ()
    """All plans of the leg."""
    planned: Sequence[PlannedSnapshot] = ()

    @property
    def trains(self) -> bool:
        """False if the attempt only adopts, rewinds or forks. Such an attempt neither makes progress nor fails."""
        return self.purpose is None

    def _to_detail(self) -> dict[str, Any]:
        found = LedgerRow._to_detail(self)
        purpose, origin = found.pop("purpose", None), found.pop("origin", None)
        if not self.memory_of:
            found = {key: value for key, value in found.items() if not key.startswith("memory_")}
        return found if purpose is None else {purpose: origin, **found}

    @classmethod
    def _from_detail(cls, detail: dict[str, Any]) -> dict[str, Any]:
        purpose = next((each for each in _PURPOSES if each in detail), None)
        return {"purpose": purpose, "origin": detail.pop(purpose or "", None), **_take(cls, detail)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LegRow(LedgerRow, kind="leg"):
    """A new leg, in the append of its first checkpoint."""

    checkpoint_id: str = ""
    leg: int = 0
    step: int = 0

    @property
    def record(self) -> Mapping[str, Any]:
        """The leg, as `Leg.from_record` reads it: the content of `detail`."""
        return self.more


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedCheckpointRow(LedgerRow, kind="quarantine"):
    """A damaged checkpoint. The head steps back to `head_after`."""

    checkpoint_id: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedRowsRow(LedgerRow, kind="quarantined_rows"):
    """Rows that a new leg leaves out: a row group that does not decode, or rows at which ranks died.

    Older versions wrote them with the kind of damaged checkpoints, without a checkpoint.
    """

    older_kinds: ClassVar[tuple[str, ...]] = ("quarantine",)
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
    """Rows that a branch leaves out: those of a source for which a filter is true."""

    source: int
    """Number of the source in the job spec, from 0."""
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindRow(LedgerRow, kind="rewind"):
    """A step of the head back to a checkpoint, at which a branch begins."""

    checkpoint_id: str | None = None
    """The new head. None: the run is at its beginning."""
    step: int = 0
    left: str | None = None
    left_step: int = 0
    exclude: Sequence[Exclusion] = ()
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
    """A row of a kind that this version does not know. Its columns are in `more`."""

    def to_columns(self) -> Columns:
        """Return the row as the table has it."""
        return dict(self.more)


HEAD_KINDS = tuple(kind for kind in KINDS.values() if kind not in (AdvanceRow, OtherRow))
"""Every kind but advances: the state of a run, without its consumption."""
_READERS: dict[str, Callable[[Any], object]] = {
    "quarantined": lambda reasons: tuple((int(position), reason) for position, reason in reasons.items()),
    "rank_nodes": lambda each: [(node, ranks) for node, ranks in each],
    "planned": lambda each: [PlannedSnapshot(**snapshot) for snapshot in each],
    "exclude": lambda each: [Exclusion(**exclusion) for exclusion in each],
}
"""Fields that JSON has in another form -> their value from it."""


def repeatable(rows: Iterable[LedgerRow]) -> list[Columns]:
    """Return rows as a manifest repeats them. Rows that are not committed have no value that the commit decides."""
    columns = ((row.to_columns(), _LEFT_OUT if row.seq else _SET_BY_COMMIT) for row in rows)
    return [{name: each[name] for name in each if each[name] is not None and name not in out} for each, out in columns]


def names_of_kinds(kinds: Sequence[type[LedgerRow]]) -> list[str]:
    """Return the kinds in the table that rows of these classes may have."""
    return list(dict.fromkeys(name for each in kinds for name in (each.kind, *each.older_kinds)))


DEFAULTS: dict[type[LedgerRow], dict[str, Any]] = {
    kind: {each.name: getattr(kind(), each.name) for each in fields(kind)} for kind in KINDS.values()
}
"""Class -> field -> its default value."""


@cache
def _layouts() -> dict[type[LedgerRow], tuple[dict[str, str], dict[str, Any]]]:
    # It takes long to import, and `dlac --help` needs no row.
    from dlac_pipeline.lakehouse.ledger.schemas import CONSUMPTION

    names = {column: _FIELDS.get(column, column) for column in CONSUMPTION.column_names}
    found = {}
    for kind, defaults in DEFAULTS.items():
        columns = {column: name for column, name in names.items() if name in defaults}
        found[kind] = columns, {name: defaults[name] for name in defaults if name not in columns.values()}
    return found


def columns_of(kind: type[LedgerRow]) -> dict[str, str]:
    """Return column -> field, of those columns that are fields of a class."""
    return _layouts()[kind][0]


def details_of(kind: type[LedgerRow]) -> dict[str, Any]:
    """Return field -> its default value, of the fields that `detail` has."""
    return _layouts()[kind][1]


def _take(kind: type[LedgerRow], detail: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a class from the content of `detail`. Return those that it has."""
    found = {name: detail.pop(key) for name in details_of(kind) if (key := _KEYS.get(name, name)) in detail}
    return {name: _READERS[name](value) if name in _READERS else value for name, value in found.items()}
