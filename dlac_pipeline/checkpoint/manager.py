"""Checkpoint Manager: a rank's part in staging, sealing and committing a checkpoint, at once or in another thread.

Asynchronous: training waits while a part of the state is copied, and rows consumed after that step belong to the next checkpoint.
One checkpoint at a time is in progress. Until its rows are in the ledger, its files mean nothing.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together, failure_named, name_failure
from dlac_pipeline.checkpoint.commit.coordinator import Committer, Prepared
from dlac_pipeline.checkpoint.commit.ledger_rows import AttemptLeg, Vote
from dlac_pipeline.checkpoint.commit.local_copies import LocalCopies, node_name
from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.checkpoint.finiteness import WeightsCheck
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct, Writer, in_thread
from dlac_pipeline.checkpoint.stage.durable_writer import DurableWriter, Phases
from dlac_pipeline.checkpoint.step_gate import StepGate
from dlac_pipeline.checkpoint.store import stage_name, storing, tiers_of
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.typed_rows import repeatable
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker

_LOCAL_COPIES = 2
"""Newest checkpoints whose copies stay on the node if the store is another place: the head, and one for a damaged head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint that exists."""

    checkpoint_id: str
    step: int
    rows_by_source: list[int]
    """Rows of each source that were applied or skipped since the parent."""
    bytes: int
    location: str
    """Address of its folder."""
    ledger_snapshot_id: int
    """Snapshot of the ledger that first shows it."""
    losses: list[float]
    """Losses of the steps since the parent, where they were known."""
    phases: dict[str, float]
    """Seconds of each phase, of the slowest rank: copy (asynchronous only), write and within it digest, seal (past the write),
    sync or upload (by threads), vote, commit, stall (the wait of training), and total."""
    note: Mapping[str, Any]
    """Facts for its row: why it was taken."""

    def event(self) -> dict[str, object]:
        """Return the event for listeners."""
        return {
            "event": "checkpoint",
            "checkpoint_id": self.checkpoint_id,
            "step": self.step,
            "loss": self.losses[-1] if self.losses else None,
            "rows": sum(self.rows_by_source),
            "rows_by_source": self.rows_by_source,
            "bytes": self.bytes,
            "location": self.location,
            "ledger_snapshot_id": self.ledger_snapshot_id,
            "reason": self.note["reason"],
            "duration_s": self.phases["total"],
            "phases": self.phases,
        }


@dataclass(kw_only=True, slots=True)
class _Staged:
    """Part of a rank in a checkpoint, handed to its writer."""

    prepared: Prepared
    folder: Path
    writer: Writer
    sealer: DurableWriter
    failure: tuple[str, str] | None
    started: float
    phases: Phases


class CheckpointManager:
    """Part of a rank in taking checkpoints. `save`, `begin` and `settle` are collective."""

    def __init__(
        self,
        spec: JobSpec,
        trained: AttemptLeg,
        lakehouse: Lakehouse,
        *,
        tree: RankTree,
        background_tree: RankTree,
        evicts: bool,
    ) -> None:
        """`background_tree` has the messages of commits in the background. One rank of a node `evicts` its local copies."""
        settings = spec.checkpoint
        self._trained, self._spec, self._lakehouse = trained, spec, lakehouse
        self._attempt = trained.attempt
        self.leg_json = trained.leg.to_json()
        """The leg that is trained."""
        self.head = trained.parent
        """The last checkpoint that this attempt committed, or resumed from."""
        self._tree = tree
        self._background_tree = background_tree
        self._tiers = tiers_of(spec)
        self._committer = Committer(trained, spec, lakehouse, self._tiers)
        """Works at the coordinator."""
        keep = min(_LOCAL_COPIES, settings.keep_last or _LOCAL_COPIES)
        self._copies = LocalCopies(self._tiers, keep=keep, evicts=evicts, resumed_from=trained.parent_folder)
        self._memory = CopyMemory()
        self._last: DurableWriter | None = None
        """Writer of the last checkpoint that this rank's process group committed in this attempt."""
        self.gate = StepGate()
        """Gate in front of the optimizers' steps, open until the script's engine is known."""
        self._pending: Future[Committed] | None = None
        self._pending_record: ReaderStateTracker | None = None
        self._failure: Exception | None = None
        self.own_s = 0.0
        """Seconds that this rank's part of all checkpoints took, votes and commits left out."""
        self.own_bytes = 0

    @property
    def under_way(self) -> bool:
        """True if a checkpoint is being committed in the background."""
        return self._pending is not None and not self._pending.done()

    def watch_steps(self, engine: Engine) -> None:
        """Copy a part of an engine's states beside training from now on."""
        self.gate = StepGate(engine)

    def continue_after(self, parent: str | None, *, leg_is_new: bool) -> None:
        """Continue after a checkpoint that another process group of this attempt committed. None is in progress here."""
        self._trained = replace(self._trained, parent=parent, is_new=leg_is_new)
        self._committer = Committer(self._trained, self._spec, self._lakehouse, self._tiers)
        self.head, self._failure, self._last = parent, None, None

    def enter_leg(self, trained: AttemptLeg) -> None:
        """Commit the steps of the next leg from now on. No checkpoint is in progress, and no step is uncommitted."""
        self._trained, self.leg_json = trained, trained.leg.to_json()
        self._committer.enter_leg(trained)

    def in_progress(self) -> list[ReaderStateTracker]:
        """Return the record of the checkpoint that is being committed, if one is."""
        return [] if self._pending is None or self._pending_record is None else [self._pending_record]

    def save(
        self,
        engine: Engine,
        tracker: ReaderStateTracker,
        note: Mapping[str, Any],
        weights: WeightsCheck,
        *,
        since: float,
    ) -> Committed:
        """Take a checkpoint of the state after `tracker.step`, and commit it with the rows that were consumed since the last one.

        The one before is settled. The coordinator's `note` goes into the checkpoint's row. Training waits `since`
        this monotonic time.

        Raises:
            StoreUnavailable: a rank could not save. Nothing was committed.
            SpecInvalid: loading would refuse something in a rank's state. Nothing was committed.
            CursorMismatch: a reader differs from the order. Nothing was committed.
            LossNotFinite: `weights` of a rank are not finite. Nothing was saved.
            Fenced, HeadMoved, CommitOutcomeUnknown: from the ledger, on all ranks.
        """
        self._check(weights)
        staged = self._stage(engine, tracker, note, since, None)
        committed = self._noting(staged, self._tree)
        committed.phases["stall"] = committed.phases["total"]
        return committed

    def begin(
        self,
        engine: Engine,
        tracker: ReaderStateTracker,
        note: Mapping[str, Any],
        weights: WeightsCheck,
        *,
        since: float,
    ) -> None:
        """Copy the state after `tracker.step`, and commit it in the background. The one before is settled.

        Training waits `since` this monotonic time. Raises `LossNotFinite` if `weights` of a rank are not finite. Nothing of
        them is committed.
        """
        if engine.writes_itself:
            self._check(weights)  # before the trainer writes its files, of which no copies are made
        staged = self._stage(engine, tracker, note, since, weights)
        staged.phases["stall"] = time.monotonic() - since
        self._pending_record = staged.prepared.taken
        self._pending = in_thread(partial(self._noting, staged, self._background_tree), "checkpoint")
        if isinstance(staged.writer, Copies):
            self.gate.hold(staged.writer.wait)

    def done(self) -> Committed | None:
        """Return the checkpoint that was in progress, once, if it is committed by now. Raises as `settle`."""
        return self.settle() if self._pending is None or self._pending.done() else None

    def settle(self) -> Committed | None:
        """Wait for the checkpoint in progress, if any, and return it once. Raise its `CheckpointError` or `LedgerError`."""
        if self._failure is not None:
            raise self._failure
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _stage(
        self,
        engine: Engine,
        tracker: ReaderStateTracker,
        note: Mapping[str, Any],
        started: float,
        weights: WeightsCheck | None,
    ) -> _Staged:
        """Pass this rank's state to the writer. A rank that cannot write votes no.

        With `weights` the state is copied, and they are checked on the way. Without, it is written at once.
        """
        in_background = weights is not None
        name = stage_name(attempt=self._attempt.number, step=tracker.step, nonce=self._trained.nonce)
        folder = self._tiers.folder(name)
        sealer = DurableWriter(self._tiers, name, in_background=in_background, after=self._last)
        writer: Writer = Direct(sealer.save)
        if weights is not None:
            writer = Copies(self._memory, sealer.save, stable=self.gate.stable())
        phases, failure = Phases(), None
        with phases.of("copy" if in_background else "write"):
            try:
                self._tiers.make(name)
            except DlacError as err:
                failure = name_failure(err, doing="staging")
            try:  # even without a folder: the engine's save is collective
                with storing(folder):
                    engine.save(folder, writer.write)
                    save_rng(folder, self._tree.rank, writer.write)
            except DlacError as err:
                failure = failure or name_failure(err, doing="saving")
            writer.handed_over()
        if weights is not None:
            self._check(weights)
        return _Staged(
            prepared=Prepared(name=name, engine=engine.name, taken=tracker.take(), note=note),
            folder=folder,
            writer=writer,
            sealer=sealer,
            failure=failure,
            started=started,
            phases=phases,
        )

    def _check(self, weights: WeightsCheck) -> None:
        """Raise `LossNotFinite` at all ranks if the weights of one are not finite."""
        with failing_together(self._tree, doing="checking the weights"):
            weights.finish()

    def _noting(self, staged: _Staged, tree: RankTree) -> Committed:
        """Complete it. A failure is final: the tracker has moved on, and a later checkpoint would leave out these rows."""
        try:
            return self._complete(staged, tree)
        except Exception as err:
            self._failure = err
            raise

    def _complete(self, staged: _Staged, tree: RankTree) -> Committed:
        vote = self._vote(staged)
        with staged.phases.of("vote"):
            votes = tree.gather(msgpack.packb(vote))
        answer, taken = None, staged.prepared.taken
        if votes is not None:
            prepared = replace(staged.prepared, waited_s=staged.phases["vote"])
            answer = msgpack.packb(self._committer.decide([msgpack.unpackb(each) for each in votes], prepared))
        decision = msgpack.unpackb(tree.broadcast(answer))
        if decision["error"] is not None:
            raise failure_named(decision["error"])
        self.head, self._last = decision["checkpoint_id"], staged.sealer
        self._copies.committed(staged.prepared.name)
        phases = {**staged.phases, **decision.pop("phases"), "total": time.monotonic() - staged.started}
        del decision["error"]
        note = staged.prepared.note
        return Committed(step=taken.step, losses=list(taken.losses), phases=phases, note=note, **decision)

    def _vote(self, staged: _Staged) -> Vote:
        """Make this rank's files durable, and return its vote."""
        files: list[dict[str, Any]] = []
        failure = staged.failure
        try:
            if failure is None:
                with storing(staged.folder):
                    if isinstance(staged.writer, Copies):
                        with staged.phases.of("copy"):
                            staged.writer.copy_rest()
                    with staged.phases.of("write"):
                        staged.writer.finish()
                    with staged.phases.of("seal"):
                        files = [asdict(entry) for entry in staged.sealer.finish()]
                staged.phases.update(staged.sealer.phases)
                self.own_bytes += sum(entry["bytes"] for entry in files)
        except Exception as err:  # every other rank waits for a vote
            failure = name_failure(err, doing=f"the writing of rank {self._tree.rank}")
        finally:
            staged.writer.close()
            if isinstance(staged.writer, Copies):
                staged.phases.add("stall", staged.writer.waited_s)
            staged.sealer.close()
            self.own_s += sum(staged.phases.get(name, 0.0) for name in ("copy", "write", "seal"))
        taken = staged.prepared.taken
        return {
            "failure": failure,
            "node": node_name(),
            "files": files,
            "phases": staged.phases,
            "step": taken.step,
            "groups": list(taken.groups),
            "cursors": [] if taken.cursors is None else taken.cursors.tolist(),
            "reader": taken.coordinate.index,
            "advances": repeatable(taken.advances()),
            "moved": taken.digest(),
        }
