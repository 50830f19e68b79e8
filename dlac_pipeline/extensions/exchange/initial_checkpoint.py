"""Beginning of a run from an existing state: its claim, and its first checkpoint, at step 0."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.collectives import failure_named
from dlac_pipeline.checkpoint.commit.coordinator import Committer, Prepared
from dlac_pipeline.checkpoint.commit.ledger_rows import AttemptLeg, Vote
from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.store import Tiers, stage_name, storing, tiers_of
from dlac_pipeline.lakehouse.errors import SpecInvalid, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import Attempt
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, ForkRow, LedgerRow, Purpose
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from dlac_pipeline.track.tracker import ReaderStateTracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """The state that a run begins with."""

    engine: str
    """Name of the engine that loads the state."""
    world_size: int
    """Number of ranks that saved the state."""
    make: Callable[[str, Path], list[FileEntry]]
    """Function that fills the folder of the checkpoint with this name. It returns the entries of its durable files."""
    purpose: Mapping[str, Any]
    """Purpose and origin of the claim, as fields of its `ClaimRow`."""
    note: Mapping[str, Any]
    """Further fields of the checkpoint's row."""
    rows: Sequence[ForkRow] = ()
    """Further rows of the same append."""


def check_new(rows: Sequence[LedgerRow], run: str, *, purpose: Purpose) -> None:
    """Raise `SpecInvalid` unless the run of these rows is new, or has only unfinished claims for this purpose."""
    claims = [row for row in rows if isinstance(row, ClaimRow) and row.purpose != purpose]
    checkpoints = [row for row in rows if isinstance(row, CheckpointRow)]
    if claims or checkpoints:
        raise SpecInvalid(
            f"expected no run named {run!r} yet, found one with {len(checkpoints)} checkpoints: choose another name"
        )


def begin(lakehouse: Lakehouse, spec: JobSpec, beginning: Beginning) -> str:
    """Claim the spec's run, commit its first checkpoint, and return its id. The caller holds the run's lock.

    Raises:
        StoreUnavailable: the checkpoint cannot be written to the store. Nothing was committed, and the call can be repeated.
        Fenced: another launch claimed the run since then.
    """
    plans = Plans(lakehouse)
    point = start_attempt(plans, spec, ClaimRequest(purpose=beginning.purpose))
    opened = open_leg(plans, Leg.from_json(point.leg), spec)
    attempt = Attempt(run=spec.run, number=point.attempt, nonce=point.nonce)
    leg = AttemptLeg(attempt=attempt, leg=opened.leg, is_new=True, order=opened.order)
    tiers = tiers_of(spec)
    committer = Committer(leg, spec, lakehouse, tiers)
    name = stage_name(attempt=point.attempt, step=0, nonce=point.nonce)
    files = _make_files(beginning, tiers, name)
    taken = ReaderStateTracker(committed_step=0, groups=range(opened.order.settings.key_groups))
    prepared = Prepared(
        name=name, engine=beginning.engine, taken=taken, waited_s=0.0, note=beginning.note, rows=beginning.rows
    )
    decision = committer.decide(_votes(opened, files, beginning.world_size), prepared)
    if decision["error"] is not None:
        raise failure_named(decision["error"])
    return str(decision["checkpoint_id"])


def _make_files(beginning: Beginning, tiers: Tiers, name: str) -> list[FileEntry]:
    """Return the files, or remove all of them if they cannot be made."""
    folder, copy = tiers.folder(name), tiers.copy_of(name)
    tiers.make(name)
    with storing(folder):
        try:
            return beginning.make(name, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if copy is not None:
                with suppress(StoreUnavailable):
                    tiers.files.hurried().remove(copy)
            raise


def _votes(opened: OpenLeg, files: Sequence[FileEntry], world_size: int) -> list[Vote]:
    """Return the votes of `world_size` ranks that have read nothing. The first rank has all files."""
    groups = range(opened.order.settings.key_groups)
    start = opened.start_state()
    cursors = [[list(start[source][group]) for source in range(len(start))] for group in groups]
    empty: Vote = {name: [] for name in ("files", "groups", "cursors", "advances")}
    nothing: Vote = {**empty, "failure": None, "node": "", "phases": {}, "step": 0, "moved": ""}
    first = {**nothing, "files": [asdict(entry) for entry in files], "groups": list(groups), "cursors": cursors}
    return [{**(nothing if rank else first), "reader": rank} for rank in range(world_size)]
