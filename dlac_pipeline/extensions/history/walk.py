"""Walk over a table's history, from a planned snapshot on: the possible rows of every data file, and where they are read.

Two facts describe a data file: the planned files whose rows it may contain (`origins`), and whether it may contain new rows
(`fresh`). Where one file mixes both, keys tell rows apart. Without keys, fresh files are read where they were last separate,
and planned rows are followed until one is deleted from its new place.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dlac_pipeline.extensions.history.row_keys import Keys
from dlac_pipeline.extensions.history.row_matching import match
from dlac_pipeline.extensions.history.steps import Place, Step, TableRows
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from dlac_pipeline.lakehouse.iceberg.snapshots import table_name
from dlac_pipeline.plan.legs.changes import OnOverwrite, Portion

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Held:
    """The possible content of a live data file. `opaque`: unwanted rows that cannot be distinguished from others."""

    origins: frozenset[str] = _NOTHING
    fresh: bool = False
    opaque: bool = False


@dataclass(kw_only=True, slots=True)
class Found:
    """Result of a walk. `portions` is the error if the history is lost."""

    steps: list[Step] = field(default_factory=list)
    portions: tuple[Portion, ...] | AppendHistoryLost = ()
    places: dict[str, set[Place]] = field(default_factory=lambda: defaultdict(set))
    """Planned file -> where rows of it still count as live."""
    unsure: set[str] = field(default_factory=set)
    """Planned files whose rows cannot be followed."""
    spared: list[tuple[int, int]] = field(default_factory=list)
    """Snapshots before and after deletes that do not count."""
    pure: set[Place] = field(default_factory=set)
    """Places of rewritten files that hold planned rows only."""
    mixed: set[Place] = field(default_factory=set)
    """Places of rewritten files that hold planned rows and others: `merged_rows` at most, all together."""
    merged_rows: int = 0


class Walk:
    """The state of the table while the steps are taken, from `since` on."""

    def __init__(self, rows: TableRows, since: int, until: int, keys: Keys | None, on_overwrite: OnOverwrite) -> None:
        self._rows, self._since, self._until, self._keys = rows, since, until, keys
        self._on_overwrite = on_overwrite
        self._planned = rows.files(since)
        self._held = {path: _Held(frozenset((path,))) for path in self._planned}
        self._portions: dict[int, set[str]] = defaultdict(set)
        self._found = Found()

    def take(self, step: Step) -> None:
        """Follow one step."""
        self._found.steps.append(step)
        lost = [path for path in step.removed if path not in self._held]
        if lost:
            raise self._contradiction(step, f"the removal of {lost[0]!r}, which was not there")
        removed = {path: self._held.pop(path) for path in step.removed}
        if not step.added:
            self._dropped(removed)
        elif step.operation == "gap":
            self._take_gap(step, removed)
        elif step.operation in ("replace", "delete"):
            self._rewritten(step, removed)
        elif removed or step.deletes_added:
            self._overwritten(step, removed)
        else:
            self._add(step, _Held(fresh=True))

    def conclude(self) -> Found:
        """Return the result of the walk, at its end."""
        until = self._rows.files(self._until)
        if self._held.keys() != until.keys():
            different = sorted(self._held.keys() ^ until.keys())[0]
            raise self._contradiction(
                self._found.steps[-1], f"{different!r} where it should not be, or not where it should"
            )
        for path, held in self._held.items():
            place = (self._until, path)
            if held.fresh:
                self._portions[self._until].add(path)
            if self._keys is not None or path in self._planned:
                self._stays(place, held)
            elif len(self._rows.dead(place)):
                self._found.unsure |= held.origins
        order = [self._since, *(step.snapshot_id for step in self._found.steps)]
        self._found.portions = tuple(
            Portion(snapshot_id=snapshot_id, files=frozenset(self._portions[snapshot_id]))
            for snapshot_id in sorted(self._portions, key=order.index)
        )
        return self._found

    def conclude_without_history(self, err: AppendHistoryLost) -> Found:
        """Return the result if the history is lost: only files that still exist are known."""
        until = self._rows.files(self._until)
        existing = {path for path in self._planned if path in until}
        if self._on_overwrite == "ignore":  # deletes may be those of an overwrite
            existing = {path for path in existing if len(self._rows.dead((self._until, path))) == 0}
        places = {path: {(self._until, path)} for path in existing}
        return Found(steps=self._found.steps, portions=err, places=places, unsure=self._planned.keys() - existing)

    def _contradiction(self, step: Step, found: str) -> AppendHistoryLost:
        return AppendHistoryLost(
            f"expected the manifests of {table_name(self._rows.table)!r} to have its history from {self._since} to "
            f"{self._until}, found in snapshot {step.snapshot_id} {found}: start a new run"
        )

    def _add(self, step: Step, held: _Held) -> None:
        self._held |= dict.fromkeys(step.added, held)

    def _stays(self, place: Place, held: _Held) -> None:
        """Rows of planned files count as live in this place."""
        for origin in held.origins:
            self._found.places[origin].add(place)
        if held.origins and not held.opaque and place[1] not in self._planned:
            (self._found.mixed if held.fresh else self._found.pure).add(place)

    def _dropped(self, removed: Mapping[str, _Held]) -> None:
        if self._keys is None:
            self._found.unsure |= _origins({path: held for path, held in removed.items() if path not in self._planned})

    def _take_gap(self, step: Step, removed: Mapping[str, _Held]) -> None:
        if self._keys is None and (removed or (step.deletes_added and self._on_overwrite != "read")):
            raise AppendHistoryLost(
                f"expected all snapshots of {table_name(self._rows.table)!r} from {self._since} to {self._until}, found some "
                f"expired, during which {len(step.added)} data files were added and "
                f"{f'{len(removed)} planned ones taken away' if removed else 'rows deleted'}: new rows cannot be distinguished "
                "from old ones; declare identity_columns, or start a new run"
            )
        origins = frozenset(self._planned) if step.deletes_added else _origins(removed)
        self._found.merged_rows += sum(step.added.values())
        self._add(step, _Held(origins if self._keys else _NOTHING, fresh=True))

    def _rewritten(self, step: Step, removed: Mapping[str, _Held]) -> None:
        """Rows moved to other files ("replace"), or the rest of them was copied ("delete"): none came."""
        before, after = sum(step.removed.values()), sum(step.added.values())
        if after > before:
            raise self._contradiction(step, f"a {step.operation!r} that makes {after} rows of {before}")
        origins = _origins(removed)
        if self._keys is None:
            self._lose_track(step, removed, moved=step.operation == "replace")
        if self._keys is None and origins:
            self._read_before(step, removed)
            self._add(step, _Held(origins, opaque=True))
        elif any(held.opaque for held in removed.values()):  # what is merged with ignored rows counts as it was before
            self._keep_before(step, removed)
            self._add(step, _Held(opaque=True))
        else:
            self._found.merged_rows += sum(
                step.removed[path] for path, held in removed.items() if origins and not held.origins
            )
            self._add(step, _Held(origins, any(held.fresh for held in removed.values())))

    def _lose_track(self, step: Step, removed: Mapping[str, _Held], *, moved: bool) -> None:
        """Stop following rows of planned files into other files, if some were deleted there and no keys exist."""
        for path, held in removed.items():
            nothing_lost = sum(step.removed.values()) == sum(step.added.values())
            if moved and path in self._planned and (step.parent is not None or nothing_lost):
                self._found.places[path].add((self._since if step.parent is None else step.parent, path))
            elif not moved or step.parent is None or len(self._rows.dead((step.parent, path))):
                self._found.unsure |= held.origins

    def _read_before(self, step: Step, removed: Mapping[str, _Held]) -> None:
        """Fresh files are read as they were right before the step that takes them away."""
        for path in [path for path, held in removed.items() if held.fresh]:
            place = (self._parent(step, f"data file {path!r}, which came since, is merged with others"), path)
            self._portions[place[0]].add(path)
            self._stays(place, removed[path])

    def _keep_before(self, step: Step, removed: Mapping[str, _Held]) -> None:
        """Fresh files are read as they were before the step, and planned rows count as live there."""
        self._read_before(step, removed)
        for path in [path for path, held in removed.items() if held.origins]:
            place = (self._parent(step, f"data file {path!r} is merged with rows that are ignored"), path)
            if self._keys is not None or path in self._planned:
                self._stays(place, removed[path])
            elif len(self._rows.dead(place)):
                self._found.unsure |= removed[path].origins

    def _parent(self, step: Step, why: str) -> int:
        if step.parent is None:
            raise AppendHistoryLost(
                f"expected the snapshot of {table_name(self._rows.table)!r} before {step.snapshot_id}, in which {why}, found it "
                "expired: declare identity_columns, or start a new run"
            )
        return step.parent

    def _overwritten(self, step: Step, removed: Mapping[str, _Held]) -> None:
        if self._keys is None and self._on_overwrite == "stop":
            raise self._overwrite(step, "and no keys to distinguish new rows from kept ones")
        if self._keys is None and self._on_overwrite == "read":
            self._dropped(removed)
            return self._add(step, _Held(fresh=True))
        sources = {**removed, **(self._held if step.deletes_added else {})}
        only_removes = self._on_overwrite != "read" and self._only_removes(step, removed)
        if self._on_overwrite == "ignore" and (not only_removes or any(held.opaque for held in sources.values())):
            return self._ignored(step, removed)
        self._found.merged_rows += sum(step.added.values())
        fresh = not only_removes or any(held.fresh for held in sources.values())
        return self._add(step, _Held(_origins(sources), fresh))

    def _overwrite(self, step: Step, found: str) -> AppendHistoryLost:
        ways = ["or keep snapshots until every run has seen them"] if step.parent is None else []
        ways += ["or declare identity_columns"] if self._keys is None else []
        return AppendHistoryLost(
            f"expected appends and deletes in {table_name(self._rows.table)!r} since {self._since}, found an overwrite, snapshot "
            f"{step.snapshot_id} ({len(step.removed)} data files removed, {len(step.added)} added), {found}: "
            + ", ".join(["set on_overwrite to 'read' or 'ignore'", *ways])
        )

    def _only_removes(self, step: Step, removed: Mapping[str, _Held]) -> bool:
        """Return True if an overwrite wrote only rows that it removed: then it only deleted, as pyiceberg does."""
        parent = step.parent
        unknown = parent is None and (step.deletes_added or removed.keys() - self._planned.keys())
        if self._keys is None or unknown:
            if self._on_overwrite == "stop":
                raise self._overwrite(step, "whose parent is expired")
            return False
        before = self._since if parent is None else parent
        taken = [self._rows.rows((before, path)) for path in removed]
        if step.deletes_added:
            for path in self._held.keys() & self._rows.files(before).keys() & self._rows.files(step.snapshot_id).keys():
                died = self._rows.alive((before, path)) & ~self._rows.alive((step.snapshot_id, path))
                taken.append(self._rows.rows((before, path), died))
        written = [self._rows.rows((step.snapshot_id, path)) for path in step.added]
        _, known = match(self._rows.table, taken, written, self._keys)
        new_rows = sum(int(np.count_nonzero(one.chosen & ~mask)) for one, mask in zip(written, known, strict=True))
        if new_rows and self._on_overwrite == "stop":
            raise self._overwrite(step, f"which brings {new_rows} new rows")
        return new_rows == 0

    def _ignored(self, step: Step, removed: Mapping[str, _Held]) -> None:
        """Undo an ignored overwrite: its removed files still count, and its added files do not."""
        self._keep_before(step, removed)
        if step.deletes_added:
            self._found.spared.append((self._parent(step, "rows are deleted that still count"), step.snapshot_id))
            self._read_before(step, self._held)
            for path in [path for path, held in self._held.items() if held.fresh]:
                self._held[path] = _Held(opaque=True)
        self._add(step, _Held(opaque=True))


def _origins(held: Mapping[str, _Held]) -> frozenset[str]:
    distinct = {one.origins for one in held.values()}
    return frozenset().union(*distinct)
