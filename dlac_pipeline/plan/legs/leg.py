"""A leg: everything that determines the order of a range of steps, as one record that a resumed run is checked against."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dlac_pipeline.lakehouse.errors import FormatTooNew, ResumeMismatch
from dlac_pipeline.plan.cut import ORDER_VERSION, CutSettings
from dlac_pipeline.plan.mixture import Mixture
from dlac_pipeline.plan.order import LegOrder, LegSettings
from dlac_pipeline.plan.source_order import SourceOrder, SourceStart
from dlac_pipeline.plan.units import UnitTable

LEG_VERSION = 2
"""Version of the record. Version 1 was never released."""
ORDER_SETTINGS = ("seed", "key_groups", "batch_size", "block_slices", "shuffle", "steps")
"""Settings of a job spec's order that a leg binds, by the names of both."""
_NOT_BOUND = ("name", "table", "active", "quarantined", "start")
"""Fields of a source that no setting binds. All others may not change within the leg."""
CHANGEABLE = ("batch_size", "block_slices", "shuffle", "seed", "steps", "exclude", "weight", "passes", "snapshot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A row group to leave out, because it is missing or does not decode, or rows of it that kill the ranks."""

    path: str
    row_group: int
    reason: str
    positions: tuple[int, ...] = ()
    """Positions of the rows in the data file. Empty: the whole row group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedUnit(Unreadable):
    """A row group, or rows of it, left out from a leg on. `rows` of it were live."""

    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LegSource:
    """The part of a leg for one source, and the source's state when the leg begins."""

    name: str
    table: str
    table_uuid: str
    snapshot_id: int
    """The snapshot that was planned last."""
    schema_id: int
    """The schema as which all of the source's files are read."""
    plan_id: str
    """The plan that was made last."""
    columns: tuple[str, ...]
    row_filter: str
    exclude: tuple[str, ...] = ()
    weight: float = 1.0
    passes: int = 1
    follow: str = "pinned"
    identity_columns: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    transform: str = ""
    """Digest of the transform's code, or empty."""
    on_reject: str = "fail"
    place: str = "mixed"
    active: bool = True
    """True if this leg reads from the source, which has no new rows otherwise."""
    quarantined: tuple[QuarantinedUnit, ...] = ()
    """Row groups that are left out from this leg on."""
    start: SourceStart

    def bound(self) -> dict[str, Any]:
        """Return what may not change within the leg, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_BOUND}


@dataclass(frozen=True, kw_only=True, slots=True)
class LegSequences:
    """Conversion of documents to sequences. A tokenizer counts by its digest, tokens by their numbers."""

    length: int = 0
    column: str = ""
    tokenizer: str = ""
    begin_id: int | None = None
    end_id: int | None = None
    pad_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """The record that determines the order of a range of a run's steps."""

    index: int
    start_step: int
    seed: int
    key_groups: int
    batch_size: int
    block_slices: int
    shuffle: bool
    steps: int | None = None
    sequences: LegSequences = LegSequences()
    sources: tuple[LegSource, ...]
    order_version: int = ORDER_VERSION
    format_version: int = LEG_VERSION

    @property
    def plan_ids(self) -> list[str]:
        """Every plan that is needed to read the leg."""
        return list(dict.fromkeys(plan_id for source in self.sources for plan_id in source.start.plan_ids))

    @property
    def following(self) -> bool:
        """True if the run continues with appended rows of its sources."""
        return any(source.follow == "appends" for source in self.sources)

    @property
    def streamed(self) -> tuple[bool, ...]:
        """The sources whose samples are not rows."""
        return tuple(bool(self.sequences.length or source.transform) for source in self.sources)

    def order(self, units: Mapping[str, UnitTable]) -> LegOrder:
        """The order of this leg over the units of its plans, by plan id."""
        sources = [SourceOrder(each.start, units, self.cut_settings(index)) for index, each in enumerate(self.sources)]
        settings = LegSettings(
            key_groups=self.key_groups,
            batch_size=self.batch_size,
            start_step=self.start_step,
            steps=self.steps,
            pending_tail=self.following,
        )
        late = [source.place == "late" for source in self.sources]
        mixture = Mixture([source.weight for source in self.sources], self.key_groups, late=late)
        active = [source.active for source in self.sources]
        return LegOrder(sources, mixture, settings, streamed=self.streamed, active=active)

    def cut_settings(self, source: int) -> CutSettings:
        """Return how passes of a source that this leg enters are cut."""
        return CutSettings(
            seed=self.seed,
            key_groups=self.key_groups,
            block_slices=self.block_slices,
            shuffle=self.shuffle,
            source=source,
            version=self.order_version,
        )

    def to_json(self) -> str:
        """This leg as canonical JSON."""
        return json.dumps(self.to_record(), sort_keys=True, separators=(",", ":"))

    def to_record(self) -> dict[str, Any]:
        """Return the content of this leg's JSON."""
        record: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return record

    @classmethod
    def from_json(cls, text: str) -> "Leg":
        """The leg in `text`. Raises `FormatTooNew` if another DLAC wrote it, in a form that this one does not read."""
        return cls.from_record(json.loads(text))

    @classmethod
    def from_record(cls, raw: Mapping[str, Any]) -> "Leg":
        """Return the leg whose JSON has this content. Raises as `from_json`."""
        for name, known in (("format_version", LEG_VERSION), ("order_version", ORDER_VERSION)):
            if raw[name] != known:
                which = "an older DLAC: use that one" if raw[name] < known else "a newer DLAC: upgrade"
                raise FormatTooNew(f"expected {name} {known} of a leg, found {raw[name]}, written by {which}")
        try:
            return _ADAPTER.validate_python(dict(raw))
        except ValidationError as err:
            raise FormatTooNew(f"the leg is not one that this DLAC reads: {err}") from err

    def bound(self) -> dict[str, Any]:
        """Return what may not change within the leg, by name. With several sources the source's name comes first."""
        found = {name: getattr(self, name) for name in ORDER_SETTINGS}
        found |= {f"sequences.{name}": getattr(self.sequences, name) for name in LegSequences.__dataclass_fields__}
        found["sources"] = len(self.sources)
        for index, source in enumerate(self.sources):
            prefix = f"source {index}: " if len(self.sources) > 1 else ""
            found |= {prefix + name: value for name, value in source.bound().items()}
        return found

    def differences(self, wanted: "Leg") -> dict[str, tuple[Any, Any]]:
        """Return the differences of `wanted`: name -> this leg's value, and the requested one."""
        mine, theirs = self.bound(), wanted.bound()
        return {
            name: (mine.get(name), theirs.get(name))
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        }

    def leaves_out_more_than(self, before: "Leg | None") -> bool:
        """Return True if a source excludes or quarantines more than in the leg before."""
        known = [(set(each.exclude), set(each.quarantined)) for each in (before.sources if before else ())]
        known += [(set(), set())] * (len(self.sources) - len(known))
        return any(
            set(mine.exclude) - exclude or set(mine.quarantined) - quarantined
            for mine, (exclude, quarantined) in zip(self.sources, known, strict=False)
        )

    def check_same(self, wanted: "Leg") -> None:
        """Raise `ResumeMismatch`, which names each difference, unless `wanted` binds the same as this committed leg."""
        differing = self.differences(wanted)
        if differing:
            can_change = all(name.rpartition(": ")[2] in CHANGEABLE for name in differing)
            new_leg = ", start a new leg on purpose (--new-leg)" if can_change else ""
            raise ResumeMismatch(
                f"resuming would change what leg {self.index} of this run binds:\n{describe_differences(differing)}\n"
                f"give the committed values again{new_leg}, or start a run under another name"
            )

    def warnings(self, live_rows: int, readers: int) -> list[str]:
        """Return warnings on allowed settings that are surely not intended, or cost more than needed."""
        found = []
        if live_rows < self.batch_size and not self.following and not any(self.streamed):
            passes = max(source.passes for source in self.sources)
            found.append(
                f"the plan has {live_rows} live rows, fewer than the batch size {self.batch_size}: "
                + ("the only batch has empty slots" if passes == 1 else "a batch repeats rows of the pass before")
            )
        if self.key_groups % readers:
            found.append(
                f"{readers} readers do not divide the {self.key_groups} key groups: readers share key groups, and decode their "
                "blocks once each; choose a number of ranks whose readers divide key_groups"
            )
        return found


def describe_differences(differences: Mapping[str, tuple[Any, Any]], *, bound: str = "committed") -> str:
    """Differences of two legs, a line each."""
    return "\n".join(
        f"  {name}: {bound} {mine!r}, asked for {theirs!r}" for name, (mine, theirs) in differences.items()
    )


_ADAPTER = TypeAdapter(Leg)
