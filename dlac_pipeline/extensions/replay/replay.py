"""Ranks of a rehearsal: their start in a sandbox, and the losses of the steps that they repeat.

A sandbox is a temporary folder with a lock of its owner. The next sandbox removes one whose owner was killed.
"""

import fcntl
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.own_folders import open_own, remove_own
from dlac_pipeline.plan.legs.choice import check_sources
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.failure import HangDetector, first_cause
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter

PREFIX = "dlac-rehearsal-"
_LOCK = "owner.lock"
_REHEARSAL_VARIABLE = "DLAC_REHEARSAL"
"""Set to 1 for the ranks of a rehearsal, for scripts with side effects."""
_POLL_S = 0.05


@contextmanager
def sandbox(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder below `parent`, or below the system's folder for temporary files. Remove the folder afterwards."""
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    remove_left_overs(parent)
    folder, lock = _make_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_overs(parent: Path) -> None:
    """Remove the folders in `parent` whose owner has died. Folders of other users stay."""
    for name in [each.name for each in parent.glob(f"{PREFIX}*")]:
        with suppress(OSError), open_own(parent, name) as folder:
            descriptor = os.open(_LOCK, os.O_RDWR, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_own(parent, name)
            finally:
                os.close(descriptor)


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the lock in it. Make another one if a process removed the folder before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(folder / _LOCK), os.fstat(lock)):
                return folder, lock
        os.close(lock)


def spec_in_sandbox(spec: JobSpec, leg: Leg, successor: CheckpointRow, folder: Path) -> JobSpec:
    """Return the spec with the committed order, the recorded number of ranks, and no place outside the sandbox."""
    check_sources(spec, leg)
    names = ("seed", "batch_size", "key_groups", "block_slices", "shuffle", "steps")
    order = spec.order.model_copy(update={name: getattr(leg, name) for name in names})
    checkpoint = spec.checkpoint.model_copy(update={"store": str(folder), "local": str(folder)})
    # All ranks are on this node.
    alone = {"replicas": 0, "ranks_per_replica": 1}
    here = {**alone, "world_size": successor.world_size, "nodes": "", "termination_url": "", "on_spike": None}
    launch = spec.launch.model_copy(update={**here, "env": {**spec.launch.env, _REHEARSAL_VARIABLE: "1"}})
    return spec.model_copy(update={"order": order, "checkpoint": checkpoint, "launch": launch})


def replay(spec: JobSpec, folder: Path, point: ResumePoint) -> dict[str, Any]:
    """Run the ranks to the last step and return their records."""
    launch = folder / "launch"
    launch.mkdir()
    (launch / "spec.json").write_text(spec.model_dump_json())
    write_durably(launch / "resume.json", point.to_json().encode())
    world_size = spec.launch.world_size
    hang_detector = HangDetector(spec.launch)
    with closing(RankStarter()) as starter:
        ranks = starter.start(spec, launch, Share(world_size=world_size, ranks=world_size, port=free_port()))
        try:
            while not ranks.all_exited():
                _check_alive(ranks, spec, hang_detector)
                time.sleep(_POLL_S)
            _check_alive(ranks, spec, hang_detector)
        finally:
            ranks.end()
    events = launch / "events.jsonl"
    written = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    nothing: dict[str, Any] = {"losses": [], "skipped": [], "samples": []}
    return next((event for event in written if event["event"] == "rehearsed"), nothing)


def _check_alive(ranks: RankGroup, spec: JobSpec, hang_detector: HangDetector) -> None:
    failures = ranks.failures()
    silent = hang_detector.find_hang(ranks.heartbeats())
    if not failures and silent is None:
        return
    cause = first_cause(failures) if failures else silent
    assert cause is not None
    kind = errors.error_class(cause.kind)
    if kind is not None:
        raise kind(cause.message)
    tail = cause.traceback or ranks.log_end(cause.rank)["log_tail"]
    raise errors.TrainingFailed(f"the rehearsal of run {spec.run!r} died, production is untouched: {cause}\n{tail}")


def bits_of(loss: float | None) -> bytes | None:
    """Return the bits of a loss: equal for equal losses alone, also where they are NaN."""
    return None if loss is None else struct.pack("<d", loss)
