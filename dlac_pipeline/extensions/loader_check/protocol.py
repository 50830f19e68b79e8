"""The interface of a loader: a `Job` as its input, and a log of the consumed rows as its output.

A loader is a Python file, or a module, that defines

    open_loader(job: Job, state: bytes | None) -> Loader    opened at the saved state, or at the beginning
    SHARED_STATE: bool                                      optional: one state serves all ranks (else each rank has another)
    NOT_OFFERED: dict[str, str]                             optional: scenario -> why the loader has no such feature
    convert(job: Job) -> int                                optional: write the rows in the loader's own format into
                                                            `job.own_format`, and return the bytes written

It imports at its top everything that it would import late, because ranks are forked from a process that has imported it.
This package runs in the loader's environment: it needs Python 3.11 and numpy, and of DLAC only the modules that say so.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from dlac_pipeline.extensions.loader_check.row_log import Ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A rank of a launch. Paths are absolute. `batch_size` is global: a rank gets `rank_batch` of it."""

    home: str  # folder of the lakehouse
    catalog: dict[str, str]  # pyiceberg properties of its catalog, and its name
    table: str
    files: list[str]  # paths of the data files of the table's current snapshot, in its order
    own_format: str  # folder for the loader's own copy
    rows: int
    sequence: int  # tokens in a row, or in a packed sequence
    batch_size: int
    world_size: int
    rank: int
    workers: int  # threads or processes of a rank
    seed: int
    shuffle: bool
    filtered: bool  # only rows whose `kind` is 0 or 1
    packed: bool  # rows are documents of varying length: pack them to sequences
    passes: int
    log: str
    load: str  # state to resume from, or empty for the beginning
    save: str
    save_at: list[int]  # steps at which the state is saved, counted from the run's first
    stop_at: int  # step after which the consumer exits, or 0 for the end
    stop_after_pass: bool  # the state is saved when the loader has ended its first pass, and the consumer exits
    die_at: int  # step after which the consumer kills itself with SIGKILL, or 0 for never

    @property
    def rank_batch(self) -> int:
        """Samples of this rank in one step."""
        return self.batch_size // self.world_size

    @property
    def exit_status(self) -> int:
        """Exit status of the consumer, as `subprocess` has it."""
        return -signal.SIGKILL if self.die_at else 0

    @property
    def prefetch(self) -> int | None:
        """Batches that each worker reads ahead, as an argument of torch's DataLoader."""
        return 4 if self.workers else None


KINDS = 4


class Loader(Protocol):
    """A loader, open at some position."""

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield the batches of a pass, from the open position, or from the beginning of a later pass."""

    def ids(self, batch: Any) -> Ids:
        """Return ids of the batch: row ids, or token ids when packing. Negative ones are padding."""

    def state(self) -> bytes:
        """Return the state after the last batch."""

    def close(self) -> None:
        """Stop background work."""
