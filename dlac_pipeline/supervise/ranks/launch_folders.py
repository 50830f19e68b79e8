"""Launch folders: one per attempt on a node, with the job spec and the resume point of its ranks."""

from contextlib import suppress
from pathlib import Path

from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.own_folders import remove_tree
from dlac_pipeline.lakehouse.store_files import make_below
from dlac_pipeline.spec.job_spec import JobSpec

KEEP_LAUNCHES = 50
"""Attempts of a run whose launch folders are kept, with logs and the job specs for rehearsals. Nodes may share a folder."""
_FORGET_AT_ONCE = 5


def make_launch_folder(folder: Path) -> None:
    """Make a launch folder. Raises as `storing`."""
    with storing(folder):
        make_below(folder.parent, folder, mode=0o700)  # logs and errors may contain secrets


def write_spec(folder: Path, spec: JobSpec) -> None:
    """Write the job spec to a launch folder. Raises as `storing`."""
    path = folder / "spec.json"
    with storing(folder):
        path.touch(mode=0o600)  # the spec may contain credentials
        path.write_text(spec.model_dump_json())


def write_resume_point(folder: Path, text: str) -> None:
    """Write the resume point as JSON to a launch folder, where the ranks wait for it."""
    with storing(folder):
        write_durably(folder / "resume.json", text.encode())


def forget_launches(folder: Path, *, keep: int) -> None:
    """Remove the oldest launch folders of a run beyond `keep`. Remove only a few per call, because a launch waits for it."""
    with suppress(FileNotFoundError):  # another node that shares the folder was faster
        oldest_last = sorted(folder.glob("launch-*/"), key=lambda each: each.stat().st_mtime, reverse=True)
        for each in oldest_last[keep:][-_FORGET_AT_ONCE:]:
            with suppress(OSError):  # the next launch tries again
                remove_tree(each)
