"""A foreign loop's rows compared with the snapshot, and DLAC's reader run through the same launches. Nothing is written."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType

from dlac_pipeline.extensions.loader_check.row_log import Ids
from dlac_pipeline.extensions.loader_check.shadow.launches import Launch, read_launches
from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.snapshots import schema_id_of, snapshot_of
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.read.batch import drop_empty_slots
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.spec.job_spec import JobSpec, SequenceSpec

_EXAMPLES = 5
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Rows that the loop repeated, missed, or read from outside the snapshot, in one pass."""

    kind: str
    pass_number: int
    rows: int
    note: str = ""
    launches: list[int] = field(default_factory=list)
    """Launches that read them, the second time if they are repeated."""
    steps: list[int] = field(default_factory=list)
    """First and last step that read them so."""
    row_groups: dict[str, int] = field(default_factory=dict)
    """Rows of each row group, as "file#row group"."""
    examples: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """The first step after a restart: rows of the loop, how many of them are in the model already, and rows of DLAC."""

    launch: int
    step: int
    ranks: int
    trained: list[int]
    trained_before: list[int]
    with_dlac: list[int] | None
    """None: DLAC's reader was not run, and a note has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowReport:
    """The loop and DLAC over the same rows."""

    table: str
    snapshot_id: int
    snapshot_rows: int
    launches: int
    last_step: int
    rows_trained: int
    """Rows of the steps that are in the model, each time that they were read."""
    dlac_rows: int | None
    """None, as all counts of DLAC: its reader was not run, and a note has the reason."""
    repeated: int
    missing: int
    outside: int
    dlac_repeated: int | None
    dlac_missing: int | None
    dlac_outside: int | None
    differences: list[Difference]
    restarts: list[Restart]
    notes: list[str]

    @property
    def exact(self) -> bool:
        """True if the loop repeated and missed no row, and read none from outside."""
        return not (self.repeated or self.missing or self.outside)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "exact": self.exact}


class _Snapshot:
    """The rows of a snapshot, by id."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec, by: str, snapshot_id: int) -> None:
        place = {"version": snapshot_id, "columns": [by], "passes": None, "follow": "pinned"}
        source = spec.source.model_copy(update={**place, "nullable": [], "ragged": [], "transform": ""})
        self.spec = spec.with_sources([source]).model_copy(update={"sequences": SequenceSpec()})
        self.plans = Plans(lakehouse)
        self.plan = self.plans.add(make_plan(lakehouse, source, write=False))
        self.by = by
        ids, self._units = self._read(open_leg(self.plans, self.leg(self.spec), self.spec))
        order = np.argsort(ids, kind="stable")
        self.ids: Ids = ids[order]
        self._units = self._units[order]

    def leg(self, spec: JobSpec) -> Leg:
        """Return the leg over this snapshot, with the order of a spec."""
        return first_leg(spec, [self.plan])

    def find(self, ids: Ids) -> tuple[Ids, Flags]:
        """Return the place of each id in `self.ids`, and whether it exists."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return places, self.ids[places] == ids

    def row_groups(self, places: Ids) -> dict[str, int]:
        """Return how many of these rows each row group has, most first."""
        counts = Counter(self._units[places].tolist())
        return {"{}#{}".format(*self.plan.units.place(unit)): rows for unit, rows in counts.most_common()}

    def _read(self, opened: OpenLeg) -> tuple[Ids, Ids]:
        units, decoder, ids, owners = self.plan.units, opened.sources[0].decoder, [], []
        for unit in np.flatnonzero(units.live_rows).tolist():
            path, row_group = units.place(unit)
            column = decoder.row_group(path, row_group, int(units.rows[unit]))[self.by].take(units.live_offsets(unit))
            if column.null_count:
                raise SpecInvalid(f"expected an id in each row, found NULL in {self.by!r} of {path!r}: name a key")
            ids.append(column.to_numpy().astype(np.int64))
            owners.append(np.full(len(column), unit))
        return np.concatenate(ids), np.concatenate(owners)


def compare_shadow(lakehouse: Lakehouse, spec: JobSpec, folder: Path, *, by: str) -> ShadowReport:
    """Compare the files in a folder with the order of a job spec, by an integer column that identifies rows.

    The spec names the snapshot, or else it was current when the first launch began.

    Raises:
        SpecInvalid: the folder has no files, the spec has several sources, or the column is no key.
        UnsupportedColumn: the column has no integers.
        BadInput, LakehouseError: as from planning and reading.
    """
    launches = read_launches(folder)
    if len(spec.sources) > 1 or spec.source.format != "iceberg":
        raise SpecInvalid("expected one source, an Iceberg table, found another one: shadow one table of it at a time")
    table = lakehouse.load(spec.source.table)
    snapshot_id = _find_snapshot(table, spec, launches[0])
    fields = table.schemas()[schema_id_of(table, snapshot_of(table, snapshot_id))].fields
    found = [each for each in fields if each.name == by]
    if not found or not isinstance(found[0].field_type, IntegerType | LongType):
        has = f"of type {found[0].field_type}" if found else f"only {[each.name for each in fields]!r}"
        raise UnsupportedColumn(f"expected integers in column {by!r} of {spec.source.table!r}, found {has}: name a key")
    pinned = _Snapshot(lakehouse, spec, by, snapshot_id)
    if twice := int((np.diff(pinned.ids) == 0).sum()):
        raise SpecInvalid(f"expected one row for each value of {by!r}, found {twice:,} repeated values: name a key")
    current = table.current_snapshot()
    moved = current is not None and current.snapshot_id != snapshot_id
    try:
        now = _Snapshot(lakehouse, spec, by, current.snapshot_id) if current and moved else pinned
    except BadInput as err:
        launches[0].doubts.append(f"rows that were appended or deleted since are unknown: {err}")
        now = None
    return _Comparison(launches, pinned, now).report()


def _find_snapshot(table: Table, spec: JobSpec, first: Launch) -> int:
    if spec.source.snapshot_id is not None or spec.source.ref:
        return snapshot_of(table, spec.source.snapshot_id, ref=spec.source.ref).snapshot_id
    found = table.snapshot_as_of_timestamp(first.started_ns // 1_000_000)
    if found is None:
        began = datetime.fromtimestamp(first.started_ns / 1e9, UTC)
        raise SpecInvalid(
            f"expected a snapshot of {spec.source.table!r} from before {began:%Y-%m-%d %H:%M:%S} UTC, when the first launch "
            "began, found none: name the snapshot that the loop read as source.version"
        )
    return found.snapshot_id


class _Comparison:
    def __init__(self, launches: Sequence[Launch], pinned: _Snapshot, now: _Snapshot | None) -> None:
        self.launches, self.pinned, self.now = launches, pinned, now
        seen = {each.pass_number for launch in launches for each in launch.surviving()} or {0}
        self.passes = range(min(seen), max(seen) + 1)  # with those that the loop left out
        self.begin = next(launch.step for launch in launches if launch.survives)

    def report(self) -> ShadowReport:
        differences = [each for number in self.passes for each in self._differences(number)]
        totals = Counter[str]()
        for each in differences:
            totals[each.kind] += each.rows
        ours = self._count_ours()
        source = self.pinned.spec.source
        return ShadowReport(
            table=source.table,
            snapshot_id=self.pinned.plan.row.snapshot_id,
            snapshot_rows=len(self.pinned.ids),
            launches=len(self.launches),
            last_step=self.launches[-1].last_step,
            rows_trained=len(self._all["id"]),
            dlac_rows=ours.get("read"),
            repeated=totals["repeated"],
            missing=totals["missing"],
            outside=totals["outside"],
            dlac_repeated=ours.get("repeated"),
            dlac_missing=ours.get("missing"),
            dlac_outside=ours.get("outside"),
            differences=differences,
            restarts=self._restarts(),
            notes=self._notes(),
        )

    @cached_property
    def _all(self) -> Mapping[str, Ids]:
        """Columns of the rows that are in the model, in the order of steps."""
        found = sorted(
            ((each.step, launch.number, each) for launch in self.launches for each in launch.surviving()),
            key=lambda each: each[:2],
        )
        repeats = [len(each.ids) for _, _, each in found]
        columns = {
            "step": [step for step, _, _ in found],
            "launch": [number for _, number, _ in found],
            "pass": [each.pass_number for _, _, each in found],
        }
        rows = {name: np.repeat(np.array(values, dtype=np.int64), repeats) for name, values in columns.items()}
        return {**rows, "id": np.concatenate([np.empty(0, np.int64), *(each.ids for _, _, each in found)])}

    def _is_finished(self, number: int) -> bool:
        """Return True if the loop has read all of a pass that it would, and from its beginning."""
        whole = self.begin == 0 or number > self.passes[0]
        return whole and (number < self.passes[-1] or self.launches[-1].has_ended)

    def _differences(self, number: int) -> list[Difference]:
        mine = self._all["pass"] == number
        ids = self._all["id"][mine]
        places, known = self.pinned.find(ids)
        first = np.zeros(len(ids), np.bool_)
        first[np.unique(ids, return_index=True)[1]] = True
        found = []
        for kind, chosen in (("repeated", ~first), ("outside", first & ~known)):
            if chosen.any():
                found.append(self._difference(kind, number, places, chosen & known, np.flatnonzero(mine)[chosen]))
        if self._is_finished(number):
            unread = np.ones(len(self.pinned.ids), np.bool_)
            unread[places[known]] = False
            if unread.any():
                gone = int((~self.now.find(self.pinned.ids[unread])[1]).sum()) if self.now else 0
                found.append(
                    Difference(
                        kind="missing",
                        pass_number=number,
                        rows=int(unread.sum()),
                        note=f"{gone:,} of them were deleted since" if gone else "",
                        row_groups=self.pinned.row_groups(np.flatnonzero(unread)),
                        examples=self.pinned.ids[unread][:_EXAMPLES].tolist(),
                    )
                )
        return found

    def _difference(self, kind: str, number: int, places: Ids, known: Flags, rows: Ids) -> Difference:
        """Return the difference of some of all rows. `known` are the rows of the pass that the snapshot has."""
        ids, steps = self._all["id"][rows], self._all["step"][rows]
        later = int(self.now.find(ids)[1].sum()) if kind == "outside" and self.now else 0
        return Difference(
            kind=kind,
            pass_number=number,
            rows=len(ids),
            note=f"{later:,} of them were appended since" if later else "",
            launches=sorted(set(self._all["launch"][rows].tolist())),
            steps=[int(steps.min()), int(steps.max())],
            row_groups=self.pinned.row_groups(places[known]),
            examples=ids[:_EXAMPLES].tolist(),
        )

    @cached_property
    def _obstacle(self) -> str:
        """Reason for which DLAC's reader cannot run through the launches. Empty if it can."""
        if self.begin:
            return f"the record begins after step {self.begin}, and does not say with which row of a pass"
        size = self.pinned.spec.order.batch_size
        for launch, _ in _launches_in_model(self.launches, finished=self._is_finished(self.passes[-1])):
            if size % launch.world_size:
                return (
                    f"order.batch_size is {size}, which the {launch.world_size} ranks of launch {launch.number} do not divide: "
                    "set another order.batch_size"
                )
        return ""

    @cached_property
    def _ours(self) -> "_Replay | None":
        if self._obstacle:
            return None
        finished = self._is_finished(self.passes[-1])
        return replay_launches(self.pinned, self.launches, passes=self._count_of_passes, finished=finished)

    @property
    def _count_of_passes(self) -> int:
        return self.passes[-1] - self.passes[0] + 1

    def _count_ours(self) -> dict[str, int]:
        """Return the rows that DLAC reads, repeats, misses, and reads from outside, in all passes together.

        In the middle of a pass none is missing yet.
        """
        if self._ours is None:
            return {}
        passes = self._count_of_passes
        places, known = self.pinned.find(self._ours.ids)
        times = np.bincount(places[known], minlength=len(self.pinned.ids))
        return {
            "read": len(self._ours.ids),
            "repeated": int(np.maximum(times - passes, 0).sum()),
            "missing": int(np.maximum(passes - times, 0).sum()) if self._ours.finished else 0,
            "outside": int((~known).sum()),
        }

    def _restarts(self) -> list[Restart]:
        found = []
        for launch in self.launches[1:]:
            if not launch.survives:
                continue
            step = launch.step + 1
            first = [each for records in launch.ranks.values() for each in records if each.step == step]
            trained = np.concatenate([np.empty(0, np.int64), *(each.ids for each in first)])
            before = self._all["step"] < step
            number = first[0].pass_number if first else 0
            again = np.isin(trained, self._all["id"][before & (self._all["pass"] == number)])
            found.append(
                Restart(
                    launch=launch.number,
                    step=step,
                    ranks=launch.world_size,
                    trained=trained.tolist(),
                    trained_before=trained[again].tolist(),
                    with_dlac=None if self._ours is None else self._ours.first.get(launch.number, []),
                )
            )
        return found

    def _notes(self) -> list[str]:
        notes = [gap for launch in self.launches for gap in launch.gaps()]
        if self.begin:
            notes.append(f"the record begins at step {self.begin}: rows of pass {self.passes[0]} before it are unknown")
        if self._obstacle:
            notes.append(f"DLAC's reader was not run: {self._obstacle}")
        steps, size = len(np.unique(self._all["step"])), self.pinned.spec.order.batch_size
        if steps and (mean := round(len(self._all["id"]) / steps)) != size:
            notes.append(f"a step of the loop has {mean:,} rows on average, and of DLAC {size:,} (order.batch_size)")
        if not self._is_finished(self.passes[-1]):
            notes.append(f"pass {self.passes[-1]} has not ended, so its other rows do not count as missing")
        return notes


@dataclass(kw_only=True, slots=True)
class _Replay:
    """The rows that DLAC's reader gives in the steps that are in the model."""

    ids: Ids
    first: dict[int, list[int]]
    """Launch -> rows of its first step."""
    finished: bool


def _launches_in_model(launches: Sequence[Launch], *, finished: bool) -> list[tuple[Launch, int | None]]:
    """Return the launches that have steps in the model, each with the last one. None: the step at which the passes end."""
    found = []
    for launch in launches:
        end = launch.kept if launch.kept is not None else None if finished else launch.last_step
        if end is None or end > launch.step:
            found.append((launch, end))
    return found


def replay_launches(pinned: _Snapshot, launches: Sequence[Launch], *, passes: int, finished: bool) -> _Replay:
    """Run DLAC's reader through the launches: each resumes at its step, with its number of ranks.

    The first one begins at step 0, and the ranks of each divide the batch size.
    """
    order = pinned.spec.order.model_copy(update={"passes": passes, "steps": None})
    spec = pinned.spec.model_copy(update={"order": order})
    opened = open_leg(pinned.plans, pinned.leg(spec), spec)
    step = opened.leg.start_step
    parts: list[Ids] = []
    first: dict[int, list[int]] = {}
    for launch, end in _launches_in_model(launches, finished=finished):
        limit, read = None if end is None else end - launch.step, []
        for rank in range(launch.world_size):
            read = _read_share(opened, pinned.by, DataCoordinate(rank, launch.world_size), after=step, limit=limit)
            parts += read
            first.setdefault(launch.number, []).extend(read[0].tolist() if read else [])
        step += len(read)
    return _Replay(ids=np.concatenate([np.empty(0, np.int64), *parts]), first=first, finished=finished)


def _read_share(opened: OpenLeg, by: str, share: DataCoordinate, *, after: int, limit: int | None) -> list[Ids]:
    """Return the ids in each batch of a share after a step, in at most `limit` batches."""
    with closing(opened.reader(coordinate=share, step=after)) as reader:
        batches = (drop_empty_slots(batch) for batch in islice(reader, limit))
        return [batch.tensors[by].numpy().astype(np.int64) for batch in batches]
