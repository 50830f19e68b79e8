"""Files of `Shadow` as launches: which recorded steps are in the model, and which were lost with a restart."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlac_pipeline.extensions.loader_check.row_log import END, SHADOW_VERSION, SUFFIX, Record, read_records
from dlac_pipeline.lakehouse.errors import FormatTooNew, SpecInvalid


@dataclass(kw_only=True, slots=True)
class Launch:
    """A start of the training, on all its ranks."""

    number: int
    """Number of the launch, from 1."""
    step: int
    """Step of the checkpoint from which it resumed."""
    world_size: int
    started_ns: int
    ranks: dict[int, list[Record]] = field(default_factory=dict)
    kept: int | None = None
    """Last step that is in the model, because a later launch resumed there, or did not. None: all."""
    closed: set[int] = field(default_factory=set)
    """Ranks that have called `close`."""
    doubts: list[str] = field(default_factory=list)
    """Sentences about facts that the files lack."""

    @property
    def has_ended(self) -> bool:
        """True if the training has ended."""
        return bool(self.closed)

    @property
    def survives(self) -> bool:
        """True if it has steps that are in the model, or would."""
        return self.kept is None or self.kept > self.step

    @property
    def last_step(self) -> int:
        """The last step that a rank recorded."""
        return max((records[-1].step for records in self.ranks.values() if records), default=self.step)

    def surviving(self) -> Iterator[Record]:
        """Yield the records of steps that are in the model."""
        for records in self.ranks.values():
            yield from (each for each in records if self.kept is None or each.step <= self.kept)

    def gaps(self) -> list[str]:
        """Return sentences about ranks without a whole record, whose rows seem to be missing."""
        until = self.last_step if self.kept is None else self.kept
        missing = sorted(set(range(self.world_size)) - set(self.ranks)) if self.survives else []
        found = [f"launch {self.number} has no file of rank {rank}" for rank in missing]
        lasts = {rank: records[-1].step if records else self.step for rank, records in sorted(self.ranks.items())}
        short = [(rank, last) for rank, last in lasts.items() if last < until and rank not in self.closed]
        return [*self.doubts, *found] + [
            f"launch {self.number} has steps up to {last} of rank {rank}, and trained up to {until}"
            for rank, last in short
        ]


class _File(NamedTuple):
    """A file of one rank of a launch."""

    format_version: int
    rank: int
    world_size: int
    step: int
    started_ns: int
    records: list[Record]


def read_launches(folder: Path) -> list[Launch]:
    """Return the launches that have files in a folder, in their order.

    Raises:
        SpecInvalid: there is none, or a file has other content.
        FormatTooNew: a later version wrote one.
    """
    found = {path.name: _read_file(path) for path in sorted(folder.glob(f"*{SUFFIX}"))}
    files = [file for file in found.values() if file]
    if not files:
        raise SpecInvalid(
            f"expected files of Shadow in {str(folder)!r}, found none: name the folder that the training loop was given"
        )
    launches = []
    for number, group in enumerate(_group_files(sorted(files, key=lambda each: each.started_ns)), 1):
        first = group[0]
        launch = Launch(number=number, step=first.step, world_size=first.world_size, started_ns=first.started_ns)
        for file in group:
            launch.ranks[file.rank] = [each for each in file.records if each.pass_number != END]
            if len(launch.ranks[file.rank]) < len(file.records):
                launch.closed.add(file.rank)
        launches.append(launch)
    torn = [name for name, file in found.items() if file is None]
    launches[0].doubts += [f"{name} has no whole line: nothing was recorded in it" for name in torn]
    _find_kept(launches)
    return launches


def _group_files(files: Sequence[_File]) -> list[list[_File]]:
    """Return the files of each launch. They are in the order of time.

    Files with the same step and number of ranks may be of two launches: the second has a rank again. It begins after
    the longest pause before that, because a launch may have no file of a rank that failed early.
    """
    groups: list[list[_File]] = []
    for file in files:
        last = groups[-1] if groups else []
        if not last or (last[0].step, last[0].world_size) != (file.step, file.world_size):
            groups.append([file])
            continue
        last.append(file)
        earlier = [at for at, each in enumerate(last[:-1]) if each.rank == file.rank]
        if earlier:
            ends = range(earlier[0] + 1, len(last))
            end = max(ends, key=lambda at: (last[at].started_ns - last[at - 1].started_ns, at))
            groups[-1:] = [last[:end], last[end:]]
    return groups


def _find_kept(launches: Sequence[Launch]) -> None:
    """Set the last step that each launch keeps. Each one resumed from the latest earlier launch that has its step.

    If none has it, that is the one with most steps, whose record is incomplete. All others keep nothing.
    """
    *earlier, child = launches
    for launch in earlier:
        launch.kept = launch.step
    while earlier := [each for each in earlier if each.number < child.number and each.step <= child.step]:
        reached = [each for each in earlier if each.last_step >= child.step]
        if len(trained := [each.number for each in reached if each.step < child.step]) > 1:
            numbers = ", ".join(map(str, trained))
            child.doubts.append(
                f"launch {child.number} resumed at step {child.step}, which launches {numbers} have: it is taken to be that of "
                f"launch {reached[-1].number}"
            )
        parent = reached[-1] if reached else max(earlier, key=lambda each: (each.last_step, each.number))
        parent.kept = child.step
        child = parent


def _read_file(path: Path) -> _File | None:
    """Return a file, or None if its first line is not whole."""
    line, end, log = path.read_bytes().partition(b"\n")
    if not end:
        return None
    try:
        head = {name: int(value) for name, value in json.loads(line).items()}
        file = _File(**{name: head[name] for name in _File._fields[:-1]}, records=read_records(log))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise SpecInvalid(
            f"expected a file of Shadow at {str(path)!r}, found another content: move it out of the folder"
        ) from err
    if file.format_version > SHADOW_VERSION:
        raise FormatTooNew(
            f"expected a file of Shadow of version {SHADOW_VERSION} or older, found {file.format_version} at {str(path)!r}: "
            "upgrade DLAC"
        )
    return file
