"""Checkpoint Manager, synchronous mode: stage, vote, manifest, commit, decision (design.md section 6).

A checkpoint exists when, and only when, its rows are in the ledger. Until then its folder means nothing to anybody.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack

from catalog import errors
from catalog.commits import Attempt, commit_checkpoint
from catalog.connect import Lakehouse
from catalog.durable_io import fsync_directory
from catalog.errors import CheckpointError, CursorMismatch, DlacError
from catalog.ledger import Ledger
from dlac_pipeline.checkpoint.engines import Engine, failed_write
from dlac_pipeline.checkpoint.manifest import FileEntry, Manifest
from dlac_pipeline.checkpoint.rng import save_rng
from dlac_pipeline.checkpoint.store import MANIFEST, file_digest, stage_folder, storing, sync_file
from dlac_pipeline.checkpoint.tree import RankTree
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.order import Advance, LegOrder
from dlac_pipeline.plan.planner import record_cut
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
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Where this attempt's next checkpoint hangs: its parent, and the ledger rows since then."""

    parent: str | None
    rows_since: list[dict[str, Any]]


class CheckpointManager:
    """One rank's part in taking checkpoints; every method is collective."""

    def __init__(
        self,
        *,
        attempt: Attempt,
        store: str,
        order: LegOrder,
        leg: Leg,
        leg_is_new: bool,
        lineage: Lineage,
        tree: RankTree,
        lakehouse: Lakehouse,
    ) -> None:
        self._attempt = attempt
        self._store = store
        self._order = order
        self._leg = leg
        self._leg_is_new = leg_is_new
        self._lineage = lineage
        self._tree = tree
        self._lakehouse = lakehouse
        self._ledger = Ledger(lakehouse)
        self._cuts: dict[tuple[int, int], str] = {}

    @property
    def head(self) -> str | None:
        """The last checkpoint that this attempt committed, or resumed from."""
        return self._lineage.parent

    def save(self, engine: Engine, tracker: ReaderStateTracker) -> Committed:
        """Take a checkpoint of the state after `tracker.step`, and commit it with what was consumed since the last.

        Raises:
            StoreUnavailable: a rank could not save; nothing was committed.
            CursorMismatch: a reader stood elsewhere than the order says; nothing was committed.
            Fenced, HeadMoved, CommitOutcomeUnknown: from the ledger, on all ranks.
        """
        started = time.monotonic()
        folder = stage_folder(
            self._store, self._attempt.run, attempt=self._attempt.number, step=tracker.step, nonce=self._attempt.nonce
        )
        votes = self._tree.gather(msgpack.packb(self._vote(engine, tracker, folder)))
        said = None
        if votes is not None:
            said = msgpack.packb(self._decide([msgpack.unpackb(vote) for vote in votes], engine, tracker, folder))
        decision = msgpack.unpackb(self._tree.broadcast(said))
        if decision["error"] is not None:
            kind, message = decision["error"]
            raise getattr(errors, kind, CheckpointError)(message)
        tracker.committed()
        self._leg_is_new = False
        self._lineage = Lineage(parent=decision["checkpoint_id"], rows_since=[])
        return Committed(
            checkpoint_id=decision["checkpoint_id"],
            step=tracker.step,
            rows=decision["rows"],
            bytes=decision["bytes"],
            duration_s=time.monotonic() - started,
        )

    def _vote(self, engine: Engine, tracker: ReaderStateTracker, folder: Path) -> dict[str, Any]:
        """Stage this rank's part; a rank that cannot, votes no."""
        failure = None
        files: list[FileEntry] = []
        try:
            with storing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        except DlacError as err:
            failure = _named(err)
        try:
            with storing(folder):
                written = [*engine.save(folder), save_rng(folder, self._tree.rank)]
                for path in written:
                    sync_file(path)
                    entry = FileEntry(
                        path=str(path.relative_to(folder)), bytes=path.stat().st_size, digest=file_digest(path)
                    )
                    files.append(entry)
        except DlacError as err:
            failure = failure or _named(err)
        except RuntimeError as err:
            failure = failure or (
                "StoreUnavailable",
                f"expected to save into {str(folder)!r}, found {failed_write(err)}",
            )
        cursors = [] if tracker.cursors is None else tracker.cursors.tolist()
        return {
            "failure": failure,
            "files": [asdict(entry) for entry in files],
            "step": tracker.step,
            "groups": list(tracker.groups),
            "cursors": cursors,
            "advances": [asdict(advance) for advance in tracker.advances()],
        }

    def _decide(
        self, votes: list[dict[str, Any]], engine: Engine, tracker: ReaderStateTracker, folder: Path
    ) -> dict[str, Any]:
        """At the coordinator: commit, or say why not. Whatever happens is told to all ranks."""
        try:
            return self._commit(votes, engine, tracker, folder)
        except DlacError as err:
            return {"error": _named(err)}
        except Exception as err:  # every other rank waits for an answer
            return {"error": ("CheckpointError", f"the coordinator failed with {type(err).__name__}: {err}")}

    def _commit(
        self, votes: list[dict[str, Any]], engine: Engine, tracker: ReaderStateTracker, folder: Path
    ) -> dict[str, Any]:
        for vote in votes:
            if vote["failure"] is not None:
                kind, message = vote["failure"]
                raise getattr(errors, kind, CheckpointError)(message)
        state = self._checked_reader_state(votes, tracker.step)
        files = [FileEntry(**entry) for vote in votes for entry in vote["files"]]
        checkpoint_id = f"{self._attempt.run}-{tracker.step:09d}-{self._attempt.nonce}"
        rows = self._rows(tracker, checkpoint_id, votes)
        manifest = Manifest(
            ledger_uuid=self._ledger.table_uuid,
            run=self._attempt.run,
            attempt=self._attempt.number,
            checkpoint_id=checkpoint_id,
            parent=self._lineage.parent,
            step=tracker.step,
            world_size=self._tree.world_size,
            engine=engine.name,
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
        rows[0] |= {
            "manifest_uri": (folder / MANIFEST).resolve().as_uri(),
            "manifest_digest": digest,
            "model_digest": manifest.model_digest,
        }
        commit_checkpoint(
            self._ledger, self._attempt, checkpoint_id=checkpoint_id, parent=self._lineage.parent, rows=rows
        )
        return {
            "error": None,
            "checkpoint_id": checkpoint_id,
            "rows": sum(row.get("rows_consumed", 0) for row in rows),
            "bytes": sum(entry.bytes for entry in files),
        }

    def _checked_reader_state(self, votes: list[dict[str, Any]], step: int) -> list[list[list[int]]]:
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

    def _rows(
        self, tracker: ReaderStateTracker, checkpoint_id: str, votes: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The checkpoint's row, its advances, and the leg when it is new."""
        skipped = len(tracker.skipped)
        named = {"checkpoint_id": checkpoint_id, "leg": self._leg.index}
        checkpoint = {
            "kind": "checkpoint",
            **named,
            "parent": self._lineage.parent,
            "step": tracker.step,
            "world_size": self._tree.world_size,
            "applied_steps": tracker.step - tracker.committed_step - skipped,
            "skipped_steps": skipped,
            "losses": list(tracker.losses),
        }
        advances = [
            {**named, "step": tracker.step, **self._advance_row(advance)} for advance in self._advances(tracker, votes)
        ]
        leg = {"kind": "leg", **named, "step": self._leg.start_step, "detail": self._leg.to_json()}
        quarantines = [
            {"kind": "quarantine", "leg": self._leg.index, "source": index, "detail": json.dumps(asdict(unit))}
            for index, source in enumerate(self._leg.sources)
            for unit in source.quarantined
        ]
        return [checkpoint, *([leg, *quarantines] if self._leg_is_new else []), *advances]

    def _advances(self, tracker: ReaderStateTracker, votes: list[dict[str, Any]]) -> list[Advance]:
        if not self._order.counted:
            found = [Advance(**_tuples(advance)) for vote in votes for advance in vote["advances"]]
            return sorted(found, key=lambda each: (each.source, each.group))
        return [
            advance
            for first, last, applied in tracker.stretches()
            for group in range(self._order.settings.key_groups)
            for advance in self._order.advances(group, first, last, applied=applied)
        ]

    def _advance_row(self, advance: Advance) -> dict[str, Any]:
        cut = self._order.sources[advance.source].open_cut_of(advance.pass_index)
        reasons = dict(advance.quarantined)
        return {
            "kind": "advance",
            "plan_id": cut.live_plan_id,
            "cut_id": self._cut_id(advance.source, advance.pass_index),
            "pass": advance.pass_index,
            "key_group": advance.group,
            "source": advance.source,
            "block": advance.block,
            "position_start": advance.position_start,
            "position_end": advance.position_end,
            "first_step": advance.first_step,
            "last_step": advance.last_step,
            "rows_consumed": advance.rows_consumed,
            "rows_dead": advance.rows_dead,
            "rows_filtered": len(advance.filtered),
            "rows_quarantined": len(reasons),
            "token_start": advance.token_start,
            "token_end": advance.token_end,
            "filtered": list(advance.filtered) or None,
            "quarantined": list(reasons) or None,
            "detail": json.dumps({"quarantined": reasons}) if reasons else None,
            "applied": advance.applied,
        }

    def _cut_id(self, source: int, pass_index: int) -> str:
        """The id of a pass's cut, whose slices are written before anything names them."""
        if (source, pass_index) not in self._cuts:
            order = self._order.sources[source]
            plan_id = order.open_cut_of(pass_index).plan_id
            self._cuts[source, pass_index] = record_cut(self._lakehouse, plan_id, order.cut_of(pass_index))
        return self._cuts[source, pass_index]


def _tuples(advance: dict[str, Any]) -> dict[str, Any]:
    """An advance as it was before it travelled."""
    quarantined = tuple((position, reason) for position, reason in advance["quarantined"])
    return {**advance, "filtered": tuple(advance["filtered"]), "quarantined": quarantined}


def _named(err: DlacError) -> tuple[str, str]:
    return type(err).__name__, str(err)
