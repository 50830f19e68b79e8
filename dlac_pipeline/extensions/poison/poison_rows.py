"""Poison rows: deaths at the same rows or at the same line of the script, and the rows that were in hand."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.plan.legs.committed_leg import replays_of
from dlac_pipeline.plan.legs.leg import Leg, Unreadable
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.plan import Plan, Plans
from dlac_pipeline.plan.source_order import SourceOrder
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.failure import SILENT_KINDS, Failure

_WITNESSES = 8
"""Other data files of the plan that are tried. One readable file shows that the store is available."""
_OF_ACCELERATOR = "AcceleratorError"
"""PyTorch's exception for an error of a device. It may come some steps late, unless the rank waits for the device in each."""
Positions = tuple[SourceOrder, int, int, int, Sequence[int]]
"""Rows of a block: its source, pass, key group and index, and the rows' positions."""
AfterDeath = Literal["restart", "leave out", "stop"]
"""The consequence of a dead attempt: another attempt, one without the rows in hand, or none."""
_NEVER_OF_ROWS = frozenset(
    {"", "ImportError", "ModuleNotFoundError", "NameError", "NotImplementedError", "SyntaxError", "UnboundLocalError"}
)
"""Exceptions for which no row is to blame. The empty string is `sys.exit`, a decision of the script."""


class CrashLoop:
    """Consequence of consecutive deaths: another attempt, one without the rows in hand, or none.

    A step stands for its rows, because attempts without a commit between them resume from one checkpoint. The rules:

    - An exception that the script raised at one place in two consecutive attempts is a bug of the script, and no attempt
      follows.
    - The rows may be to blame instead if both attempts had the same rows in hand, the script had trained other rows before,
      and values can cause the exception's class (no NameError, no `sys.exit`).
    - After `times` deaths with the same rows in hand, by such an exception, a signal or `os._exit`, an attempt leaves these
      rows out. If it dies in the same way in the same step, the rows are innocent, and no attempt follows. No checkpoint was
      committed without them, so they are not quarantined.
    - An accelerator's report in an attempt that may not have waited for it in every step blames no rows and no place. This
      holds for the first attempt and for one that had committed something. The attempt after it waits.

    A commit ends the sequence of attempts.
    """

    def __init__(self, times: int) -> None:
        """Leave rows out after `times` deaths in one step, or never if `times` is 0."""
        self._times = times
        self._step = 0
        self._tried = 0
        """The last step whose rows were left out since the last commit. They are left out only once."""
        self._tries = False
        """True if the attempt to decide on is the first one without those rows."""
        self._last = ""
        """Manner of death of the attempt before it."""
        self._trained = False
        """True if the script has finished a step in any attempt."""
        self.count = 0
        """Consecutive deaths at the current step."""
        self._has_decided = False
        """True if an attempt before this one has died."""
        self._late = 0
        """Deaths before these that an accelerator reported late: 1 or 0."""

    @property
    def undecided(self) -> bool:
        """True if more such deaths would lead to a quarantine."""
        return 0 < self.count < self._times and self._step > self._tried

    @property
    def in_a_row(self) -> int:
        """Consecutive attempts that died at the current step, as far as known."""
        return self.count + self._late

    def decide(self, failure: Failure, *, committed: bool) -> AfterDeath:
        """Note how an attempt ended, and if it had `committed` something. Return what follows."""
        if committed:
            self._step = self._tried = self.count = 0
            self._tries, self._last, self._late = False, "", 0
        has_decided, self._has_decided = self._has_decided, True
        if failure.kind == _OF_ACCELERATOR and (committed or not has_decided):
            self._late = int(not committed)
            return "restart"
        self._trained = self._trained or committed or failure.trained
        repeated = bool(self._last) and self._last == _manner_of(failure)
        tries, self._tries, self._last = self._tries, False, _manner_of(failure)
        if not _has_rows(failure):
            self._step = self.count = 0
            return "stop" if repeated and failure.script_raised else "restart"
        same_rows = failure.in_hand == self._step and not tries
        self.count = self.count + 1 if failure.in_hand == self._step else 1
        self._step = failure.in_hand
        if repeated and self._is_hopeless(failure, same_rows=same_rows, tries=tries):
            return "stop"
        if not self._times or self.count < self._times or self._step <= self._tried:
            return "restart"
        self._tried, self._tries, self.count = self._step, True, 0
        return "leave out"

    def _is_hopeless(self, failure: Failure, *, same_rows: bool, tries: bool) -> bool:
        """Return True if a death that repeats the one before cannot be the fault of the rows in hand."""
        if tries:  # a later step is reached only if leaving the rows out has helped
            return failure.in_hand <= self._tried
        blames_rows = same_rows and self._trained and bool(self._times) and failure.in_hand > self._tried
        return failure.script_raised and (failure.kind in _NEVER_OF_ROWS or not blames_rows)


def _has_rows(failure: Failure) -> bool:
    """Return True if the rows in hand may be to blame, and no other rule covers the death."""
    covered = failure.kind in SILENT_KINDS or errors.error_class(failure.kind) is not None
    return failure.in_hand > 0 and not covered and failure.origin not in ("passing", "peer")


def _manner_of(failure: Failure) -> str:
    """Return the common mark of deaths of one cause, on any rank: the place of the exception, or the signal."""
    return failure.place or failure.cause.partition(" ")[2].lstrip("0123456789 ")


def rows_in_hand(
    plans: Plans, spec: JobSpec, leg: Leg, *, step: int, folder: Path
) -> Mapping[tuple[str, int], set[int]]:
    """Return the rows of the global batch of `step` by path and row group. `folder` is of an attempt that had it in hand."""
    units: dict[str, UnitTable] = {}
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        units |= {name: plans.load(name, table=source.table).units for name in mine.start.plan_ids}
    order = leg.order(units)
    if order.counted and order.total_steps is not None and step > order.total_steps:
        step = _original(plans, spec.run, leg, order, step)
    found: dict[tuple[str, int], set[int]] = {}
    # The ranks recorded the ranges of a streamed batch when they received it, with rows that are read in part.
    streamed = (
        (order.sources[source], pass_index, group, block, range(start, end))
        for source, group, pass_index, block, start, end in read_in_hand(folder, step)
    )
    for each, pass_index, group, block, positions in _of_counted(order, step) if order.counted else streamed:
        cut = each.cut_of(pass_index)
        for unit, row in map(cut.block(group, block).place_of, positions):
            found.setdefault(cut.units.place(unit), set()).add(int(cut.units.first_row[unit]) + row)
    return found


def _original(plans: Plans, run: str, leg: Leg, order: LegOrder, step: int) -> int:
    """Return the step whose rows a replay reads, or the replay, which has no rows, if no checkpoint knows that step."""
    ledger = Ledger(plans.lakehouse)
    replays = replays_of(leg, order, ledger, ledger.rows(run, kinds=HEAD_KINDS), ledger.state(run).fence.head)
    return step if replays is None or step > replays.total_steps else replays.original(step)


def _of_counted(order: LegOrder, step: int) -> Iterator[Positions]:
    """Yield the rows of sources whose positions follow from the step alone."""
    before, after = order.consumed(step - 1), order.consumed(step)
    for index, source in enumerate(order.sources):
        for group in range(order.settings.key_groups):
            for row_range in source.row_ranges(group, int(before[index, group]), int(after[index, group])):
                positions = row_range.block.positions_of(row_range.start, row_range.stop).tolist()
                yield source, row_range.pass_index, group, row_range.block.index, positions


def damaged_row_group(
    plans: Plans, spec: JobSpec, leg: Leg, path: str, row_group: int
) -> tuple[Unreadable, str] | None:
    """Return a leg's damaged row group, and the job spec's policy for it. None: it decodes now, or nothing can be read."""
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        for plan_id in mine.start.live_plan_ids:
            plan = plans.load(plan_id, table=source.table)
            places = plan.units.places()
            if (path, row_group) not in places:
                continue
            unit = places.index((path, row_group))
            decoder = open_decoder(plans.lakehouse.load(source.table), mine, [plan.row.snapshot_id])
            reason = _problem(decoder, plan, unit)
            if reason is None or not _store_answers(decoder, plan, path):
                return None
            return Unreadable(path=path, row_group=row_group, reason=reason), source.on_unreadable
    return None


def _problem(decoder: BlockDecoder, plan: Plan, unit: int) -> str | None:
    try:
        decoder.row_group(*plan.units.place(unit), int(plan.units.rows[unit]))
    except errors.DataFileUnreadable as err:
        return str(err)
    return None


def _store_answers(decoder: BlockDecoder, plan: Plan, path: str) -> bool:
    """Return True if another data file can be read, or if the plan has only one file, whose damage is then believed."""
    first_units: dict[str, int] = {}
    for unit, file in enumerate(plan.units.file.tolist()):
        first_units.setdefault(plan.units.file_paths[file], unit)
    first_units.pop(path, None)
    others = list(first_units.values())[:_WITNESSES]
    return not others or any(_problem(decoder, plan, unit) is None for unit in others)


def read_in_hand(folder: Path, step: int) -> Iterator[list[int]]:
    """Yield the ranges that the ranks' batch of `step` moves: source, key group, pass, block, first position, end position.

    A rank that died while it wrote has recorded nothing.
    """
    for path in sorted(folder.glob(in_hand_file(folder, 0).name.replace("00000", "*"))):
        with suppress(ValueError):
            recorded, moved = json.loads(path.read_text(errors="replace").partition("\n")[0])
            yield from moved if recorded == step else []
