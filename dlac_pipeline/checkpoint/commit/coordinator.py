"""The coordinator's part of a checkpoint: from all ranks' votes to the manifest and the ledger's commit, or why there is none."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from dlac_pipeline.checkpoint.collectives import failure_named, name_failure
from dlac_pipeline.checkpoint.commit.ledger_rows import (
    AttemptLeg,
    RowMaker,
    Vote,
    agreed_reader_state,
    readers_of,
)
from dlac_pipeline.checkpoint.commit.local_copies import holders_of, nodes_of_ranks
from dlac_pipeline.checkpoint.commit.retention import Retention
from dlac_pipeline.checkpoint.manifest import FileEntry, Manifest, config_digest, content_digest, mark_committed
from dlac_pipeline.checkpoint.store import MANIFEST, Tiers, folder_uri, storing
from dlac_pipeline.lakehouse.durable_io import fsync_path, write_durably
from dlac_pipeline.lakehouse.errors import DlacError, Fenced, LedgerOlderThanStore, RowsBetween, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.commits import check_mine, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState
from dlac_pipeline.plan.slices import SliceWriter
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker

_log = logging.getLogger(__name__)
_LIBRARIES = ("torch", "deepspeed", "numpy", "pyarrow", "pyiceberg")
Decision = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A staged checkpoint, as the coordinator knows it."""

    name: str
    """Name of the checkpoint, in its run's folder."""
    engine: str
    taken: ReaderStateTracker
    note: Mapping[str, Any]
    """Further facts for its row."""
    waited_s: float = 0.0
    """Seconds of the wait for the votes of all ranks."""
    rows: Sequence[typed_rows.ForkRow] = ()
    """Further rows of its append, of this checkpoint."""


class Committer:
    """Commits of one attempt's checkpoints, one at a time."""

    def __init__(self, trained: AttemptLeg, spec: JobSpec, lakehouse: Lakehouse, tiers: Tiers) -> None:
        self._attempt, self._nonce = trained.attempt, trained.nonce
        self._order = trained.order
        self._leg = trained.leg
        self._leg_is_new = trained.is_new
        self._parent = trained.parent
        self._damaged = [
            typed_rows.QuarantinedCheckpointRow(checkpoint_id=trained.parent or "", reason=trained.parent_damage)
        ][: bool(trained.parent_damage)]
        """The parent, until the first commit, if it is damaged: before that it is the head, which may not step back."""
        self._rows_since: list[typed_rows.Columns] = []
        """The run's ledger rows after the parent's."""
        self._ledger = Ledger(lakehouse)
        self._maker = RowMaker(trained.leg, trained.order)
        self._slices = SliceWriter(lakehouse, trained.order)
        self._settings = spec.checkpoint
        self._config_digest = config_digest(spec)
        self._mesh = spec.launch.mesh.recorded()
        self._tiers = tiers
        self._retention: Retention | None = None
        self._nodes_known = False
        """True if a row of this attempt records its nodes."""
        self._seq = 0
        """The run's last that is known here."""

    def enter_leg(self, trained: AttemptLeg) -> None:
        """Commit the steps of the next leg from now on. All steps before it are committed."""
        self._leg, self._order, self._leg_is_new = trained.leg, trained.order, True
        self._maker = RowMaker(trained.leg, trained.order)
        self._slices = SliceWriter(self._ledger.lakehouse, trained.order)

    def decide(self, votes: list[Vote], prepared: Prepared) -> Decision:
        """Commit, or explain why not. All ranks receive the result in any case."""
        try:
            decision = self._commit_whatever_comes_between(votes, prepared)
        except Exception as err:  # every other rank waits for an answer
            return {"error": name_failure(self._fenced_or(err), doing="the coordinator's commit")}
        self._leg_is_new = False
        self._parent, self._rows_since, self._damaged = decision["checkpoint_id"], [], []
        return decision

    def _fenced_or(self, err: Exception) -> Exception:
        """Return `Fenced` where a newer attempt owns the run: it may have removed files that this one was staging."""
        if isinstance(err, StoreUnavailable):
            try:
                check_mine(self._ledger.state(self._attempt.run), self._attempt)
            except (Fenced, LedgerOlderThanStore) as cause:
                return cause
            except DlacError as unknown:
                _log.debug("whether attempt %d is fenced off is not known: %s", self._attempt.number, unknown)
        return err

    def _commit_whatever_comes_between(self, votes: list[Vote], prepared: Prepared) -> Decision:
        """Commit with the run's rows as they are. The ledger waits for an unavailable catalog."""
        patiently = self._ledger.patiently
        patiently(self._begin)
        while True:
            try:
                return patiently(lambda: self._commit(votes, prepared))
            except RowsBetween:  # the manifest, which nothing names yet, is written again
                patiently(self._see)

    def _commit(self, votes: list[Vote], prepared: Prepared) -> Decision:
        for failure in (vote["failure"] for vote in votes if vote["failure"] is not None):
            raise failure_named(failure)
        taken, parent = prepared.taken, self._parent
        reader_state = agreed_reader_state(self._order, votes, taken.step)
        checkpoint_id = f"{self._attempt.run}-{taken.step:09d}-{self._nonce}"
        advances = self._maker.advances(taken, votes)
        checkpoint = self._maker.checkpoint(taken, checkpoint_id=checkpoint_id, parent=parent, world_size=len(votes))
        folders = {entry["folder"] for vote in votes for entry in vote["files"]}
        checkpoint = replace(checkpoint, refers_to=sorted(folders - {"", prepared.name}))
        if not self._nodes_known:
            holders = () if self._tiers.store is None else holders_of(votes)
            checkpoint = replace(checkpoint, nodes=holders, rank_nodes=nodes_of_ranks(votes))
        assert self._retention is not None, "made before the first commit"
        self._retention.check_kept(checkpoint.refers_to)
        retired = self._retention.due(checkpoint_id, taken.step, parent)
        # before the rows that name them
        cut_ids = self._slices.write((row.source, row.pass_index) for row in advances)
        rows = [
            *self._maker.rows(checkpoint, advances, cut_ids, leg_is_new=self._leg_is_new),
            *self._maker.memberships(taken, checkpoint_id),
            *self._damaged,
            *(typed_rows.RetireRow(checkpoint_id=each) for each in retired),
            *(replace(row, checkpoint_id=checkpoint_id) for row in prepared.rows),
        ]
        manifest = self._make_manifest(prepared, votes, checkpoint_id, reader_state, [checkpoint, *rows])
        names = {name for vote in votes for name in vote["phases"]}
        phases = {name: max(vote["phases"].get(name, 0.0) for vote in votes) for name in names}  # of the slowest rank
        phases["vote"] = prepared.waited_s
        checkpoint = replace(
            checkpoint,
            manifest_uri=self._tiers.manifest_uri(prepared.name),
            manifest_digest=self._write(manifest, prepared.name),
            model_digest=manifest.model_digest,
            bytes=sum(entry.bytes for entry in manifest.files),
            phases=dict(phases),
            readers=readers_of(votes),
            stages=self._mesh.get("pp", 0),
            **prepared.note,
        )
        started = time.monotonic()
        state = commit_checkpoint(
            self._ledger,
            self._attempt,
            checkpoint_id=checkpoint_id,
            parent=parent,
            rows=[checkpoint, *rows],
            seq=self._seq,
        )
        mark_committed(manifest, self._tiers.durable_run(), self._tiers.files.hurried())
        self._nodes_known = True
        self._seq += 1  # not the last seq read: the answer of this commit may come late, after rows of others
        self._retention.committed(checkpoint, retired)
        phases["commit"] = time.monotonic() - started
        sources = range(len(self._order.sources))
        rows_by_source = [sum(row.rows_consumed for row in advances if row.source == each) for each in sources]
        return {"error": None, "rows_by_source": rows_by_source, "phases": phases, **_facts_of(checkpoint, state)}

    def _make_manifest(
        self,
        prepared: Prepared,
        votes: Sequence[Vote],
        checkpoint_id: str,
        reader_state: list[list[list[int]]],
        rows: Sequence[typed_rows.LedgerRow],
    ) -> Manifest:
        return Manifest(
            ledger_uuid=self._ledger.table_uuid,
            run=self._attempt.run,
            attempt=self._attempt.number,
            checkpoint_id=checkpoint_id,
            parent=self._parent,
            step=prepared.taken.step,
            world_size=len(votes),
            engine=prepared.engine,
            leg=self._leg.index,
            reader_state=reader_state,
            files=[FileEntry(**entry) for vote in votes for entry in vote["files"]],
            config_digest=self._config_digest,
            mesh=self._mesh,
            libraries={name: version(name) for name in _LIBRARIES if find_spec(name)},
            ledger_rows=[*self._rows_since, *typed_rows.repeatable(rows)],
        )

    def _write(self, manifest: Manifest, name: str) -> str:
        """Write the manifest, after all other files and in the store last. Return its digest."""
        folder, content = self._tiers.folder(name), manifest.to_bytes()
        with storing(folder):
            for ancestor in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
                fsync_path(ancestor)  # the names of the folders themselves
            write_durably(folder / MANIFEST, content)
        if self._tiers.store is not None:
            self._tiers.files.write(self._tiers.manifest_uri(name), content, within=self._tiers.durable_run(), new=True)
        return content_digest(content)

    def _begin(self) -> None:
        """Read the run's rows before the first commit."""
        if self._retention is None:
            rows = self._ledger.rows(self._attempt.run, kinds=typed_rows.HEAD_KINDS)
            self._seq = max(row.seq for row in rows)
            self._retention = Retention(self._settings, self._tiers, self._attempt.number, [*rows, *self._damaged])
            checkpoints = [row for row in rows if isinstance(row, typed_rows.CheckpointRow)]
            since = max((row.seq for row in checkpoints if row.checkpoint_id == self._parent), default=0)
            self._rows_since = typed_rows.repeatable(row for row in rows if row.seq > since)

    def _see(self) -> None:
        """Rows that others appended since the last commit: they are kept in mind, and repeated by the next manifest."""
        rows = self._ledger.rows(self._attempt.run, after=self._seq)
        self._seq = max((row.seq for row in rows), default=self._seq)
        assert self._retention is not None, "made before the first commit"
        self._retention.saw(rows)
        self._rows_since += typed_rows.repeatable(rows)


def _facts_of(checkpoint: typed_rows.CheckpointRow, state: RunState) -> Decision:
    """Return the facts of a committed checkpoint. `state` is the ledger's last read of the run."""
    snapshot = state.table.current_snapshot()
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "bytes": checkpoint.bytes,
        "location": folder_uri(checkpoint.manifest_uri),
        "ledger_snapshot_id": 0 if snapshot is None else snapshot.snapshot_id,
    }
