"""Files of `dlac.Shadow` as launches: which recorded steps are in the model, and which were lost with a restart."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlac_pipeline.lakehouse.errors import FormatTooNew, SpecInvalid
from dlac_pipeline.track.row_log import END, SHADOW_VERSION, SUFFIX, Record, read_records


@dataclass(kw_only=True, slots=True)
class Launch:
    """One start of the training, on all its ranks."""

    number: int
    """From 1."""
    step: int
    """Step of the checkpoint from which it resumed."""
    world_size: int
    started_ns: int
    ranks: dict[int, list[Record]] = field(default_factory=dict)
    kept: int | None = None
    """Last step that is in the model, because a later launch resumed there. None: all."""
    ended: bool = False
    """True if the loop has called `close`."""

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
        missing = sorted(set(range(self.world_size)) - set(self.ranks))
        found = [f"launch {self.number} has no file of rank {rank}" for rank in missing]
        lasts = {rank: records[-1].step if records else self.step for rank, records in sorted(self.ranks.items())}
        short = [(rank, last) for rank, last in lasts.items() if last < until]
        return found + [
            f"launch {self.number} has steps up to {last} of rank {rank}, and trained up to {until}"
            for rank, last in short
        ]


def read_launches(folder: Path) -> list[Launch]:
    """Return the launches of which a folder has files, in their order.

    Raises:
        SpecInvalid: there is none, or a file has other content.
        FormatTooNew: a later version wrote one.
    """
    files = sorted((_read_file(path) for path in folder.glob(f"*{SUFFIX}")), key=lambda each: each[0]["started_ns"])
    if not files:
        raise SpecInvalid(
            f"expected files of dlac.Shadow in {str(folder)!r}, found none: name the folder that the training loop was given"
        )
    launches: list[Launch] = []
    for head, records in files:
        if not launches or not _belongs(head, launches[-1]):
            step, world_size, started_ns = head["step"], head["world_size"], head["started_ns"]
            launches.append(Launch(number=len(launches) + 1, step=step, world_size=world_size, started_ns=started_ns))
        launch = launches[-1]
        launch.ended |= any(each.pass_number == END for each in records)
        launch.ranks[head["rank"]] = [each for each in records if each.pass_number != END]
    _find_kept(launches)
    return launches


def _belongs(head: dict[str, int], launch: Launch) -> bool:
    """Return True if a file is of this launch: each rank is in a launch once."""
    same = (head["step"], head["world_size"]) == (launch.step, launch.world_size)
    return same and head["rank"] not in launch.ranks


def _find_kept(launches: Sequence[Launch]) -> None:
    kept = None
    for launch in reversed(launches):
        launch.kept = kept
        kept = launch.step if kept is None else min(kept, launch.step)


def _read_file(path: Path) -> tuple[dict[str, int], list[Record]]:
    line, _, log = path.read_bytes().partition(b"\n")
    try:
        head = {name: int(value) for name, value in json.loads(line).items()}
        version, _, _, _, _ = (head[name] for name in ("format_version", "rank", "world_size", "step", "started_ns"))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise SpecInvalid(
            f"expected a file of dlac.Shadow at {str(path)!r}, found another content: move it out of the folder"
        ) from err
    if version > SHADOW_VERSION:
        raise FormatTooNew(
            f"expected a file of dlac.Shadow of version {SHADOW_VERSION} or older, found {version} at {str(path)!r}: upgrade DLAC"
        )
    return head, read_records(log)
