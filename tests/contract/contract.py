"""Resume anywhere: the contract of every reader configuration, on real tables that change between and during its legs.

Two runs with one spec read the same tables. One is undisturbed and reads with one rank. The other is killed at any batch, with
blocks read ahead, and resumes with any number of ranks. Between legs tables are appended to, deleted from and compacted,
and the spec changes. The global batches and cursors of both must be the same, bit for bit. The rows of the undisturbed run
must follow from the tables' own history: each row once per pass, and no row that was deleted before.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.contract.runs import GlobalBatch, Run, Tensors, rows_left
from tests.contract.tables import MakeRows, SourceTable

PER_ROW = 64
"""The items of a row are numbered row_id * PER_ROW + 0, 1, 2, ..."""
_MOST_STEPS = 50_000
"""More than any example has."""
Given = Callable[[int], Sequence[int]]
Found = Callable[[Tensors, int], Sequence[int]]


def itself(row: int) -> list[int]:
    """Return the items of a row that is one sample."""
    return [row * PER_ROW]


def by_row_id(tensors: Tensors, slot: int) -> list[int]:
    """Return the items of a slot from its column row_id."""
    return itself(int(tensors["row_id"][slot]))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A reader configuration: its tables and spec, and the expected items of each row."""

    rows: MakeRows
    columns: tuple[str, ...]
    given: Given = itself
    """Row id -> the numbers of its items, in order."""
    found: Found = by_row_id
    """Tensors of a global batch and a slot -> the numbers of the slot's items."""
    check: Callable[[GlobalBatch], None] = lambda batch: None
    """Further checks of each global batch."""
    source: Mapping[str, Any] = field(default_factory=dict)
    mixture: tuple[Mapping[str, Any], ...] = ({},)
    """Fields of each source, e.g. its weight and passes."""
    order: Mapping[str, Any] = field(default_factory=dict)
    sequences: Mapping[str, Any] = field(default_factory=dict)
    keeps: Callable[[int], bool] = lambda row: True
    """Return whether the row filter keeps a row."""
    deletes: tuple[str, ...] = ()
    """Methods of `SourceTable` by which rows are deleted."""
    compacts: bool = True

    @property
    def follows(self) -> bool:
        """Whether legs follow the table to appended rows."""
        return self.source.get("follow") == "appends"

    @property
    def keyed(self) -> bool:
        """Whether rows keep their identity across rewrites."""
        return bool(self.source.get("identity_columns"))


@dataclass
class Expected:
    """The expected items of one source, derived from the changes of its table. The reader is not used."""

    reading: Reading
    table: SourceTable
    passes: int
    due: Counter[int] = field(default_factory=Counter)
    """Number of reads of each row in all, unless passes is 0."""
    known: set[int] = field(default_factory=set)
    excluded: set[int] = field(default_factory=set)
    frozen: dict[int, int] = field(default_factory=dict)
    """Rows that may not be read any more, and the number of their earlier reads."""
    left_open: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    """Key group -> items read when a leg ended -> rows that may not be read from there."""

    def plan(self) -> None:
        """Plan all live rows that were not planned before."""
        fresh = {row for row in self.table.live - self.known if self._is_expected(row)}
        self.due += Counter(dict.fromkeys(fresh, max(1, self.passes)))
        self.known = set(range(self.table.ids))

    def remove(self, rows: set[int], done: Counter[int], given: Mapping[int, int]) -> None:
        """Stop reading these rows from now on."""
        for row in rows & self.known:
            self.frozen.setdefault(row, done[row])
            if row in self.due:
                self.due[row] = self.frozen[row]
        for group, items in given.items():
            self.left_open.setdefault(group, {}).setdefault(items, set()).update(rows)

    def more_passes(self, passes: int) -> None:
        """Set the total number of passes of the source."""
        for row in self.due:
            if row not in self.frozen:
                self.due[row] += passes - self.passes
        self.passes = passes

    def exclude(self, rows: set[int], done: Counter[int], given: Mapping[int, int]) -> None:
        """Leave these rows out of a new leg."""
        self.excluded |= rows
        self.remove(rows, done, given)

    def outlives(self, rows: set[int]) -> bool:
        """Return whether these rows may be excluded. An endless source must keep a row (see `test_found`)."""
        return bool(self.passes or any(map(self.reading.given, self.due.keys() - self.frozen.keys() - rows)))

    def done(self, streams: Mapping[int, Sequence[int]]) -> Counter[int]:
        """Return how often each row was read completely, from the items of each key group in order."""
        done: Counter[int] = Counter()
        for group, stream in streams.items():
            at = 0
            while at < len(stream):
                row = stream[at] // PER_ROW
                wanted = list(self.reading.given(row))
                got = list(stream[at : at + len(wanted)])
                while got and got != wanted[: len(got)]:
                    got.pop()
                at += len(got)
                assert got, (
                    f"key group {group} continues with {stream[at : at + 3]}, expected row {row} from its beginning"
                )
                if got == wanted:
                    done[row] += 1
                elif at < len(stream):
                    assert row in self.left_open[group].get(at, ()), (
                        f"row {row} is read in part only: {got} of {wanted}"
                    )
        return done

    def check(self, done: Counter[int], left: Sequence[int] | None, state: Sequence[Any]) -> None:
        """Check that the rows read and the rows left are the expected ones."""
        silent = [row for row in self.due if not self.reading.given(row)]
        if left is None:
            low = min(cursor.pass_index for cursor in state)
            high = max(cursor.pass_index for cursor in state) + 1
            for row in set(self.due) - set(silent):
                assert self.frozen.get(row, low) <= done[row] <= self.frozen.get(row, high)
            assert set(done) <= set(self.due)
            return
        due = +Counter({row: times for row, times in self.due.items() if row not in silent})
        assert done + Counter(row for row in left if row not in silent) == due

    def _is_expected(self, row: int) -> bool:
        return self.reading.keeps(row) and row not in self.excluded


class Contract:
    """One example of the contract, drawn step by step."""

    def __init__(self, lakehouse: Lakehouse, reading: Reading, data: st.DataObject, name: str) -> None:
        self._reading = reading
        self._data = data
        self._groups = self._draw("key_groups", st.integers(1, 4))
        self._tables = [
            SourceTable(lakehouse, f"src.{name}_{index}", reading.rows, self._draw("row group", st.integers(2, 12)))
            for index in range(len(reading.mixture))
        ]
        self._raw = self._first_spec()
        self._excluded: list[set[int]] = []
        spec = self._spec()
        self._expected = [
            Expected(reading, table, 1 if reading.follows else spec.passes_of(source))
            for table, source in zip(self._tables, spec.sources, strict=True)
        ]
        for table in self._tables:
            for rows in self._draw("appends", st.lists(st.integers(1, 30), min_size=1, max_size=4)):
                table.append(rows)
        if reading.deletes:
            for table in self._tables:
                self._delete(table)
        for table in self._tables:
            if not any(reading.keeps(row) for row in table.live):
                table.append(3)  # a plan without live rows is refused
        for each in self._expected:
            while not each.passes and not any(map(reading.given, filter(reading.keeps, each.table.live))):
                each.table.append(3)  # an endless source without a sample is refused
            each.plan()
        self._whole = Run.begin(lakehouse, spec)
        self._disturbed = replace(self._whole, batches=[])

    def run(self, *, legs: int) -> None:
        """Run up to `legs` legs, the last one to its end."""
        for _ in range(self._draw("turns", st.integers(0, legs - 1))):
            ended = self._leg(self._draw("steps", st.integers(0, 12)))
            if ended and not self._reading.follows:
                break
            self._change_tables()
            self._turn(ended)
        self._leg(None)
        done = self._done()
        order = self._whole.opened.order
        for index, expected in enumerate(self._expected):
            state = self._whole.state[index]
            left = None if order.sources[index].endless else rows_left(order, index, state)
            expected.check(done[index], left, state)
            if not self._reading.follows and left is not None and self._raw["order"].get("steps") is None:
                assert not any(map(self._reading.given, left)), "a finite run reads all"
        assert self._whole.rows_consumed == sum(sum(each.values()) for each in done)

    def _leg(self, steps: int | None) -> bool:
        """Read some steps with both runs, and return whether the leg ended before."""
        read = self._whole.attempt(steps=_MOST_STEPS if steps is None else steps)
        assert len(read) < _MOST_STEPS, "the leg has an end"
        for batch in read:
            self._check(batch)
        if steps is None:
            self._check_end(read)
        ended = steps is None or len(read) < steps
        self._disturb(read, ended)
        assert self._disturbed.state == self._whole.state
        return ended

    def _disturb(self, expected: Sequence[GlobalBatch], ended: bool) -> None:
        """Bring a second run to the same step, in several attempts that read more than they commit."""
        last, size = self._whole.step, self._whole.leg.batch_size
        digests = {batch.step: batch.digest for batch in expected}
        while (missing := last - self._disturbed.step) or ended:
            ranks = self._draw("ranks", st.sampled_from([n for n in range(1, size + 1) if size % n == 0 and n <= 6]))
            commit = self._draw("commit", st.integers(0, missing)) if missing else 0
            ahead = self._draw("ahead", st.integers(0, 3))
            budget = self._draw("budget", st.sampled_from([0, 2**20]))
            read = self._disturbed.attempt(world_size=ranks, steps=commit + ahead, commit=commit, budget_bytes=budget)
            for batch in read:
                if batch.step in digests:
                    assert batch.digest == digests[batch.step], f"step {batch.step} of {ranks} ranks is another batch"
                assert batch.step <= last or not ended, f"step {batch.step} is after the end"
            if not missing:
                return
            if not commit:
                left = self._disturbed.attempt(world_size=ranks, steps=missing)
                assert [batch.digest for batch in left] == [digests[batch.step] for batch in left]

    def _check(self, batch: GlobalBatch) -> None:
        self._reading.check(batch)
        tokens = batch.tensors["document"] > 0 if self._reading.sequences else batch.valid
        assert (batch.rows, batch.tokens) == (int(batch.valid.sum()), int(tokens.sum()))
        assert ((batch.source >= 0) == batch.valid).all()
        if self._reading.follows:
            assert batch.valid.all(), "rows that do not fill a batch stay pending"
            order = self._whole.opened.order
            places = order.samples(batch.step - 1), order.samples(batch.step)
            drawn = [order.mixture.sources(group, *places, order.active) for group in range(self._groups)]
            assert np.array_equal(batch.source, np.concatenate(drawn)), "a leg ends when one of its sources does"

    def _check_end(self, read: Sequence[GlobalBatch]) -> None:
        """Check that a leg which ends with its last finite source has a sample of one in its last batch."""
        finite = [index for index, source in enumerate(self._whole.opened.order.sources) if not source.endless]
        # all rows of a source may be dropped by a transform, which one batch finds out
        if finite and not self._reading.follows and len(read) > 1:
            assert np.isin(read[-1].source, finite).any(), "the leg ends with its last finite source"

    def _change_tables(self) -> None:
        """Change tables between two legs."""
        for table in self._tables:
            for _ in range(self._draw("events", st.integers(0, 2))):
                kinds = [
                    "append",
                    *(["delete"] if self._reading.deletes else []),
                    *["compact"] * self._reading.compacts,
                ]
                kind = self._draw("event", st.sampled_from(kinds))
                if kind == "append":
                    table.append(self._draw("rows", st.integers(1, 30)))
                elif kind == "compact":
                    table.compact(self._draw("files", st.lists(st.integers(0, 5), max_size=3)))
                else:
                    self._delete(table)

    def _delete(self, table: SourceTable) -> None:
        low = self._draw("delete from", st.integers(0, table.ids - 1))
        rows = set(range(low, low + self._draw("delete", st.integers(1, 20)), self._draw("every", st.integers(1, 3))))
        if not self._reading.keyed:
            rows -= table.merged  # the deleted ones among them cannot be identified
        if any(self._reading.keeps(row) for row in table.live - rows):
            getattr(table, self._draw("how", st.sampled_from(self._reading.deletes)))(rows)

    def _turn(self, ended: bool) -> None:
        """Move both runs to the next leg."""
        done = self._done()
        given = [{group: len(stream) for group, stream in each.items()} for each in self._streams()]
        changed = self._change()
        spec, repin = self._spec(), self._reading.follows
        if not self._whole.turn(spec, repin=repin):
            return
        self._disturbed.follow(self._whole)
        for index, expected in enumerate(self._expected):
            if changed.get("exclude"):
                expected.exclude(changed["exclude"], done[index], given[index])
            if repin:
                expected.remove(set(range(expected.table.ids)) - expected.table.live, done[index], given[index])
                expected.plan()
            if changed.get("passes") and expected.passes:
                expected.more_passes(self._whole.spec.passes_of(self._whole.spec.sources[index]))

    def _change(self) -> dict[str, Any]:
        """Change the spec as a new leg may."""
        changed: dict[str, Any] = {}
        order, sources = self._raw["order"], [self._raw["source"], *self._raw["mixture"]]
        if self._draw("change batch size", st.booleans()):
            order["batch_size"] = self._groups * self._draw("per group", st.integers(1, 4))
        if self._draw("change exclude", st.booleans()):
            low = self._draw("exclude from", st.integers(0, 60))
            high = low + self._draw("exclude", st.integers(1, 15))
            if all(expected.outlives(set(range(low, high))) for expected in self._expected):
                changed["exclude"] = set(range(low, high))
                for source in sources:
                    source["exclude"] = [*source.get("exclude", []), f"row_id >= {low} AND row_id < {high}"]
        if len(sources) > 1 and self._draw("change weights", st.booleans()):
            for source in sources:
                source["weight"] = self._draw("weight", st.sampled_from([0.05, 0.3, 1.0, 2.5]))
        if not self._reading.follows and self._draw("change passes", st.booleans()):
            changed["passes"] = True
            order["passes"] = order.get("passes", 1) + 1
        if self._draw("change order", st.booleans()):
            order["seed"] = self._draw("seed", st.integers(0, 9))
            order["block_slices"] = self._draw("block slices", st.integers(1, 4))
        return changed

    def _first_spec(self) -> dict[str, Any]:
        mine = self._reading
        sources = [
            {"table": table.name, "columns": list(mine.columns), **mine.source, **one}
            for table, one in zip(self._tables, mine.mixture, strict=True)
        ]
        order = {
            "key_groups": self._groups,
            "batch_size": self._groups * self._draw("per group", st.integers(1, 4)),
            "seed": self._draw("seed", st.integers(0, 9)),
            "block_slices": self._draw("block slices", st.integers(1, 4)),
            "passes": self._draw("passes", st.integers(1, 2)),
            **mine.order,
        }
        more = {"order": order, "sequences": dict(mine.sequences), "launch": {"script": "s.py", "new_leg": True}}
        return {"run": "r", "source": sources[0], "mixture": sources[1:], **more}

    def _spec(self) -> JobSpec:
        return parse_spec(self._raw, origin="the contract")

    def _streams(self) -> list[dict[int, list[int]]]:
        """Return the items of each source and key group, in order, as the undisturbed run read them."""
        streams: list[dict[int, list[int]]] = [{group: [] for group in range(self._groups)} for _ in self._tables]
        for batch in self._whole.batches:
            for slot in np.flatnonzero(batch.valid).tolist():
                group = slot * self._groups // len(batch.valid)
                streams[int(batch.source[slot])][group] += self._reading.found(batch.tensors, slot)
        return streams

    def _done(self) -> list[Counter[int]]:
        return [each.done(streams) for each, streams in zip(self._expected, self._streams(), strict=True)]

    def _draw(self, label: str, strategy: st.SearchStrategy[Any]) -> Any:
        return self._data.draw(strategy, label=label)


def ragged(tensors: Tensors, name: str, slot: int) -> npt.NDArray[Any]:
    """Return the items of one slot of a ragged column."""
    offsets = tensors[f"{name}.offsets"]
    return tensors[name][int(offsets[slot]) : int(offsets[slot + 1])]
