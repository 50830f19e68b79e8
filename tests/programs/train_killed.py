"""train_deepspeed or train_fsdp2, of which one rank kills itself in one phase of one checkpoint of the run's first attempt.

$KILL is PHASE@STEP. copy, write, sync and vote kill the last rank: behind the copy of its first file, when half of a file
is written, before the first file is durable, before its vote is sent. manifest, before-commit, after-commit kill the coordinator:
when the manifest has its bytes but not its name, and around the ledger's commit. $ENGINE is dcp or zero,
of which param `stage` says the stage.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from dlac_pipeline.checkpoint import manager
from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.commit import coordinator as committing
from dlac_pipeline.checkpoint.stage import copies, durable_writer

PHASE, STEP = os.environ["KILL"].split("@")
_due = False
"""Whether the checkpoint in question is under way in this process."""


def die() -> NoReturn:
    """As when the kernel's OOM killer comes."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def replace(home: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Put something around the real thing, which must be there."""
    setattr(home, name, made(getattr(home, name)))


def noting(real: Any) -> Any:
    """Learn which checkpoint is being staged."""

    def stage_name(*args: Any, attempt: int, step: int, **rest: Any) -> Any:
        global _due  # noqa: PLW0603 - a program, not a library
        _due = attempt == 1 and step == int(STEP)
        return real(*args, attempt=attempt, step=step, **rest)

    return stage_name


def before(real: Any) -> Any:
    """Die instead."""

    def replaced(*args: Any, **rest: Any) -> Any:
        if _due:
            die()
        return real(*args, **rest)

    return replaced


def after(real: Any) -> Any:
    """Die when it is done."""

    def replaced(*args: Any, **rest: Any) -> Any:
        done = real(*args, **rest)
        if _due:
            die()
        return done

    return replaced


def halfway(real: Any) -> Any:
    """Die with half of a file written."""

    def write_state(state: Any, path: Path, **rest: Any) -> Any:
        written = real(state, path, **rest)
        if _due:
            os.truncate(path, path.stat().st_size // 2)
            die()
        return written

    return write_state


def unnamed(real: Any) -> Any:
    """Die with the content under its temporary name."""

    def write_durably(path: Path, content: bytes) -> None:
        if _due:
            path.with_name(f"{path.name}.tmp-{os.getpid()}").write_bytes(content)
            die()
        real(path, content)

    return write_durably


def sabotage() -> None:
    """Arrange for this rank's death, if it is the one."""
    replace(manager, "stage_name", noting)
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    coordinator = os.environ["RANK"] == "0"
    if last and PHASE == "copy":
        replace(copies.Copies, "write", after)
    if last and PHASE == "write":
        replace(durable_writer, "write_state", halfway)
    if last and PHASE == "sync":
        replace(durable_writer, "sync_file", before)
    if last and PHASE == "vote":
        replace(RankTree, "gather", before)
    if coordinator and PHASE == "manifest":
        replace(committing, "write_durably", unnamed)
    if coordinator and PHASE == "before-commit":
        replace(committing, "commit_checkpoint", before)
    if coordinator and PHASE == "after-commit":
        replace(committing, "commit_checkpoint", after)


def main() -> None:
    """Train, until then."""
    sabotage()
    if os.environ["ENGINE"] == "dcp":
        import train_fsdp2 as program  # type: ignore[import-not-found]  # the rank puts this folder on the path
    else:
        import train_deepspeed as program  # type: ignore[import-not-found]
    program.main()


if __name__ == "__main__":
    main()
