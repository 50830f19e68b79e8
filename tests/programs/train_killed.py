"""train_deepspeed or train_fsdp2, one of whose ranks kills itself in one phase of a checkpoint in each of the first attempts.

$KILL is a list of PHASE@STEP, one for each attempt. Phases copy, write, sync and vote kill the last rank: after the copy of
its first file, when half of a file is written, before the first file is durable, before its vote is sent. Phases manifest,
before-commit and after-commit kill the coordinator: when the manifest has its content but not its name, and around the
ledger's commit. $ENGINE is dcp or zero. The stage of zero is param `stage`.
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

KILLS = [kill.split("@") for kill in os.environ["KILL"].split(",")]
_due = ""
"""The phase in which this attempt dies, while this process writes that checkpoint."""


def die() -> NoReturn:
    """Die as by the kernel's OOM killer."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def replace(home: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Wrap an existing function."""
    setattr(home, name, made(getattr(home, name)))


def record_stage(real: Any) -> Any:
    """Record which checkpoint is being staged."""

    def stage_name(*args: Any, attempt: int, step: int, **rest: Any) -> Any:
        global _due  # noqa: PLW0603 - a program, not a library
        phase, killed_at = KILLS[attempt - 1] if attempt <= len(KILLS) else ("", 0)
        _due = phase if step == int(killed_at) else ""
        return real(*args, attempt=attempt, step=step, **rest)

    return stage_name


def die_in(phase: str, *, after: bool = False) -> Callable[[Any], Any]:
    """Die before the function, or after it, in a phase."""

    def wrap(real: Any) -> Any:
        def replaced(*args: Any, **rest: Any) -> Any:
            if _due == phase and not after:
                die()
            done = real(*args, **rest)
            if _due == phase:
                die()
            return done

        return replaced

    return wrap


def die_halfway(real: Any) -> Any:
    """Die with half of a file written."""

    def write_state(state: Any, path: Path | None, **rest: Any) -> Any:
        written = real(state, path, **rest)
        if _due == "write" and path is not None:
            os.truncate(path, path.stat().st_size // 2)
            die()
        return written

    return write_state


def die_before_rename(real: Any) -> Any:
    """Die when the content has only its temporary name."""

    def write_durably(path: Path, content: bytes) -> None:
        if _due == "manifest":
            path.with_name(f"{path.name}.tmp-{os.getpid()}").write_bytes(content)
            die()
        real(path, content)

    return write_durably


def sabotage() -> None:
    """Prepare this rank's deaths."""
    replace(manager, "stage_name", record_stage)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        replace(copies.Copies, "write", die_in("copy", after=True))
        replace(durable_writer, "write_state", die_halfway)
        replace(durable_writer.DurableWriter, "_make_durable", die_in("sync"))
        replace(RankTree, "gather", die_in("vote"))
    if os.environ["RANK"] == "0":
        replace(committing, "write_durably", die_before_rename)
        replace(committing, "commit_checkpoint", die_in("before-commit"))
        replace(committing, "commit_checkpoint", die_in("after-commit", after=True))


def main() -> None:
    """Train until this rank dies."""
    sabotage()
    if os.environ["ENGINE"] == "dcp":
        import train_fsdp2 as program  # type: ignore[import-not-found]  # the rank puts this folder on the path
    else:
        import train_deepspeed as program  # type: ignore[import-not-found]
    program.main()


if __name__ == "__main__":
    main()
