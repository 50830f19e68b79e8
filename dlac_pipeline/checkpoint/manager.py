"""Checkpoint Manager: stage, vote, manifest, commit, decision (design.md section 6), at once or behind training.

A checkpoint exists when, and only when, its rows are in the ledger. Until then its folder means nothing to anybody.

Synchronous: training waits for all of it. Asynchronous: training waits while the state is copied; the rest happens in a thread,
over a tree of its own, one checkpoint at a time. What is consumed after the copied step belongs to the next checkpoint.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack

from catalog import errors
from catalog.commits import Attempt, commit_checkpoint
from catalog.connect import Lakehouse
from catalog.durable_io import fsync_directory
from catalog.errors import CheckpointError, CursorMismatch, DlacError
from catalog.ledger import HEAD_KINDS, Ledger
from dlac_pipeline.checkpoint.engines import Engine, failed_write
from dlac_pipeline.checkpoint.manifest import FileEntry, Manifest
from dlac_pipeline.checkpoint.phases import Phases
from dlac_pipeline.checkpoint.retention import Retention
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.rows import RowMaker, Vote
from dlac_pipeline.checkpoint.store import MANIFEST, file_digest, stage_folder, storing, sync_file
from dlac_pipeline.checkpoint.tree import RankTree
from dlac_pipeline.checkpoint.writing import Copies, CopyMemory, Direct, Writer
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.spec import CheckpointSpec
from dlac_pipeline.track.tracker import ReaderStateTracker

_LIBRARIES = ("torch", "deepspeed", "numpy", "pyarrow", "pyiceberg")


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint that exists."""

    checkpoint_id: str
    step: int
    rows: int
    """Rows applied or skipped since the parent."""
    bytes: int
    loss: float | None
    """Of its step, where it was known."""
    phases: dict[str, float]
    """Seconds of each phase: copy (asynchronous only), write and digest, of the slowest rank; vote and commit; stall: what
    training waited; total."""
    note: Mapping[str, Any]
    """What was to be written beside it: why it was taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Where this attempt's next checkpoint hangs: its parent, and the ledger rows since then."""

    parent: str | None
    rows_since: list[dict[str, Any]]


@dataclass(kw_only=True, slots=True)
class _Staged:
    """One rank's part of a checkpoint, handed to its writer."""

    folder: Path
    engine: str
    writer: Writer
    taken: ReaderStateTracker
    failure: tuple[str, str] | None
    started: float
    note: Mapping[str, Any]
    phases: Phases = field(default_factory=Phases)


class CheckpointManager:
    """One rank's part in taking checkpoints; `save`, `begin` and `settle` are collective.

    `behind` is a tree for commits behind training, apart from every other message.
    """

    def __init__(
        self,
        *,
        attempt: Attempt,
        order: LegOrder,
        leg: Leg,
        leg_is_new: bool,
        lineage: Lineage,
        tree: RankTree,
        behind: RankTree,
        lakehouse: Lakehouse,
        settings: CheckpointSpec,
    ) -> None:
        self._attempt = attempt
        self._settings = settings
        self._order = order
        self._leg = leg
        self._leg_is_new = leg_is_new
        self._lineage = lineage
        self._tree = tree
        self._behind = behind
        self._ledger = Ledger(lakehouse)
        self._maker = RowMaker(lakehouse, leg, order)
        self._retention: Retention | None = None
        self._memory = CopyMemory()
        self._pending: Future[Committed] | None = None
        self._failure: Exception | None = None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being committed behind training."""
        return self._pending is not None and not self._pending.done()

    @property
    def head(self) -> str | None:
        """The last checkpoint that this attempt committed, or resumed from."""
        return self._lineage.parent

    def save(self, engine: Engine, tracker: ReaderStateTracker, note: Mapping[str, Any]) -> Committed:
        """Take a checkpoint of the state after `tracker.step`, and commit it with what was consumed since the last.

        The coordinator's `note` goes into the detail of the checkpoint's row.

        Raises:
            StoreUnavailable: a rank could not save; nothing was committed.
            CursorMismatch: a reader stood elsewhere than the order says; nothing was committed.
            Fenced, HeadMoved, CommitOutcomeUnknown: from the ledger, on all ranks.
        """
        self.settle()
        started = time.monotonic()
        phases = Phases()
        with phases.of("write"):
            staged = self._stage(engine, tracker, Direct(), started, phases, note)
        committed = self._noting(staged, self._tree)
        committed.phases["stall"] = committed.phases["total"]
        return committed

    def begin(self, engine: Engine, tracker: ReaderStateTracker, note: Mapping[str, Any]) -> Committed | None:
        """Copy the state after `tracker.step`, and commit it behind training; gives the one before, if it was under way.

        Raises:
            CheckpointError, LedgerError: as `save`, of the checkpoint before.
        """
        started = time.monotonic()
        before = self.settle()
        phases = Phases()
        with phases.of("copy"):
            staged = self._stage(engine, tracker, Copies(self._memory), started, phases, note)
        phases["stall"] = time.monotonic() - started
        pending: Future[Committed] = Future()
        self._pending = pending

        def complete() -> None:
            try:
                pending.set_result(self._noting(staged, self._behind))
            except BaseException as err:
                pending.set_exception(err)

        # A daemon: a process that fails otherwise does not wait for it, as the other ranks may be gone.
        threading.Thread(target=complete, name="checkpoint", daemon=True).start()
        return before

    def done(self) -> Committed | None:
        """The checkpoint that was under way, once, if it is committed by now.

        Raises:
            CheckpointError, LedgerError: it failed; the one before is untouched.
        """
        return self.settle() if self._pending is None or self._pending.done() else None

    def settle(self) -> Committed | None:
        """Wait for the checkpoint under way, if there is one; it is given once.

        Raises:
            CheckpointError, LedgerError: it failed; the one before is untouched.
        """
        if self._failure is not None:
            raise self._failure
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _stage(
        self,
        engine: Engine,
        tracker: ReaderStateTracker,
        writer: Writer,
        started: float,
        phases: Phases,
        note: Mapping[str, Any],
    ) -> _Staged:
        """Hand this rank's state to the writer; a rank that cannot, votes no."""
        folder = stage_folder(
            self._settings.store,
            self._attempt.run,
            attempt=self._attempt.number,
            step=tracker.step,
            nonce=self._attempt.nonce,
        )
        failure = None
        try:
            with storing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        except DlacError as err:
            failure = _named(err)
        try:  # even without a folder: the engine's save is collective
            with _saving(folder):
                engine.save(folder, writer.write)
                save_rng(folder, self._tree.rank, writer.write)
        except DlacError as err:
            failure = failure or _named(err)
        writer.handed_over()
        return _Staged(
            folder=folder,
            engine=engine.name,
            writer=writer,
            taken=tracker.take(),
            failure=failure,
            started=started,
            note=note,
            phases=phases,
        )

    def _noting(self, staged: _Staged, tree: RankTree) -> Committed:
        """Complete it; a failure is final: the tracker has gone on, and a later checkpoint would leave out what this one had."""
        try:
            return self._complete(staged, tree)
        except Exception as err:
            self._failure = err
            raise

    def _complete(self, staged: _Staged, tree: RankTree) -> Committed:
        """Write, vote, and hear the decision."""
        vote = self._vote(staged)
        with staged.phases.of("vote"):
            votes = tree.gather(msgpack.packb(vote))
        said = None
        if votes is not None:
            said = msgpack.packb(self._decide([msgpack.unpackb(each) for each in votes], staged))
        decision = msgpack.unpackb(tree.broadcast(said))
        if decision["error"] is not None:
            kind, message = decision["error"]
            raise getattr(errors, kind, CheckpointError)(message)
        self._leg_is_new = False
        self._lineage = Lineage(parent=decision["checkpoint_id"], rows_since=[])
        losses = staged.taken.losses
        return Committed(
            checkpoint_id=decision["checkpoint_id"],
            step=staged.taken.step,
            rows=decision["rows"],
            bytes=decision["bytes"],
            loss=losses[-1] if losses else None,
            phases={**staged.phases, **decision["phases"], "total": time.monotonic() - staged.started},
            note=staged.note,
        )

    def _vote(self, staged: _Staged) -> Vote:
        files: list[FileEntry] = []
        failure = staged.failure
        if failure is None:
            try:
                files = self._written(staged)
            except DlacError as err:
                failure = _named(err)
            except Exception as err:  # every other rank waits for a vote
                failure = "CheckpointError", f"rank {self._tree.rank} failed with {type(err).__name__}: {err}"
        taken = staged.taken
        return {
            "failure": failure,
            "files": [asdict(entry) for entry in files],
            "phases": staged.phases,
            "step": taken.step,
            "groups": list(taken.groups),
            "cursors": [] if taken.cursors is None else taken.cursors.tolist(),
            "advances": [asdict(advance) for advance in taken.advances()],
        }

    def _written(self, staged: _Staged) -> list[FileEntry]:
        """This rank's files, durable."""
        folder, found = staged.folder, []
        with _saving(folder):
            with staged.phases.of("write"):
                paths = staged.writer.finish()
                for path in paths:
                    sync_file(path)
            with staged.phases.of("digest"):
                for path in paths:
                    name, size = str(path.relative_to(folder)), path.stat().st_size
                    found.append(FileEntry(path=name, bytes=size, digest=file_digest(path)))
        return found

    def _decide(self, votes: list[Vote], staged: _Staged) -> dict[str, Any]:
        """At the coordinator: commit, or say why not. Whatever happens is told to all ranks."""
        try:
            return self._commit(votes, staged)
        except DlacError as err:
            return {"error": _named(err)}
        except Exception as err:  # every other rank waits for an answer
            return {"error": ("CheckpointError", f"the coordinator failed with {type(err).__name__}: {err}")}

    def _commit(self, votes: list[Vote], staged: _Staged) -> dict[str, Any]:
        for vote in votes:
            if vote["failure"] is not None:
                kind, message = vote["failure"]
                raise getattr(errors, kind, CheckpointError)(message)
        taken, folder, parent = staged.taken, staged.folder, self._lineage.parent
        state = self._checked_reader_state(votes, taken.step)
        files = [FileEntry(**entry) for vote in votes for entry in vote["files"]]
        checkpoint_id = f"{self._attempt.run}-{taken.step:09d}-{self._attempt.nonce}"
        rows = self._maker.rows(
            taken,
            votes,
            leg_is_new=self._leg_is_new,
            checkpoint_id=checkpoint_id,
            parent=parent,
            world_size=self._tree.world_size,
        )
        retention = self._retention = self._retention or self._retaining()
        retired = retention.due(checkpoint_id, taken.step, parent)
        rows += [{"kind": "retire", "checkpoint_id": each} for each in retired]
        manifest = Manifest(
            ledger_uuid=self._ledger.table_uuid,
            run=self._attempt.run,
            attempt=self._attempt.number,
            checkpoint_id=checkpoint_id,
            parent=parent,
            step=taken.step,
            world_size=self._tree.world_size,
            engine=staged.engine,
            leg=self._leg.index,
            reader_state=state,
            files=files,
            libraries={name: version(name) for name in _LIBRARIES},
            ledger_rows=[*self._lineage.rows_since, *rows],
        )
        with storing(folder):
            for ancestor in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
                fsync_directory(ancestor)  # the names of the folders themselves
            digest = manifest.write(folder)
        size = sum(entry.bytes for entry in files)
        names = {name for vote in votes for name in vote["phases"]}
        phases = {name: max(vote["phases"].get(name, 0.0) for vote in votes) for name in names}
        phases["vote"] = staged.phases["vote"]  # what the coordinator waited for all of them
        rows[0] |= {
            "manifest_uri": (folder / MANIFEST).resolve().as_uri(),
            "manifest_digest": digest,
            "model_digest": manifest.model_digest,
            "detail": json.dumps({"bytes": size, "phases": phases, **staged.note}),
        }
        started = time.monotonic()
        commit_checkpoint(self._ledger, self._attempt, checkpoint_id=checkpoint_id, parent=parent, rows=rows)
        retention.committed(rows[0], retired)
        return {
            "error": None,
            "checkpoint_id": checkpoint_id,
            "rows": sum(row.get("rows_consumed", 0) for row in rows),
            "bytes": size,
            "phases": {**phases, "commit": time.monotonic() - started},
        }

    def _retaining(self) -> Retention:
        """From the rows of the attempts before: this one has committed nothing yet."""
        rows = self._ledger.rows(self._attempt.run, kinds=HEAD_KINDS)
        return Retention(self._settings, self._attempt.run, self._attempt.number, rows, self._ledger.table_uuid)

    def _checked_reader_state(self, votes: list[Vote], step: int) -> list[list[list[int]]]:
        """The cursors that the readers reported, by source and key group.

        Where the steps say where every cursor stands, each is compared with that; ranks that share a key group must agree.
        """
        counted = self._order.counted
        state = [[list(c) for c in cursors] for cursors in self._order.reader_state(step)] if counted else None
        reported: dict[int, list[list[int]]] = {}
        for rank, vote in enumerate(votes):
            if vote["step"] != step:
                raise CursorMismatch(f"expected rank {rank} at step {step}, found step {vote['step']}")
            for group, cursors in zip(vote["groups"], vote["cursors"], strict=bool(vote["cursors"])):
                expected = reported.setdefault(group, cursors) if state is None else [each[group] for each in state]
                if cursors != expected:
                    raise CursorMismatch(
                        f"expected the cursors of key group {group} at {expected} after step {step}, rank {rank} "
                        f"reported {cursors}: the reader and the order disagree; nothing was committed"
                    )
        if state is not None:
            return state
        groups = range(self._order.settings.key_groups)
        return [[reported[group][source] for group in groups] for source in range(len(self._order.sources))]


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Turn failures to write, torch's own among them, into `StoreUnavailable`."""
    with storing(folder):
        try:
            yield
        except RuntimeError as err:
            raise failed_write(err) from err


def _named(err: DlacError) -> tuple[str, str]:
    return type(err).__name__, str(err)
