"""Training run of a script: `training_run()` provides resumed batches, tracking, and checkpoints.

    with dlac_pipeline.training_run() as run:
        engine = ...                      # model, optimizer and loop belong to the script
        run.restore(engine)
        for batch in run.batches():
            loss = batch.mean(loss_per_sample)  # on any device
            ...                           # backward, optimizer step
            run.step_done(loss)

Under `dlac train` the launch folder names the run and the rank. Under torchrun or the `deepspeed` launcher, pass the job
spec: `training_run("job.toml")`. Rank 0 then claims the run itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.commit.coordinator import AttemptLeg
from dlac_pipeline.checkpoint.engines import Engine, adapt, skip_shared_memory_op
from dlac_pipeline.checkpoint.failures import failing_together
from dlac_pipeline.checkpoint.finiteness import FinitenessCheck
from dlac_pipeline.checkpoint.manager import Committed
from dlac_pipeline.checkpoint.open_manager import open_manager
from dlac_pipeline.checkpoint.rng import seed_rng
from dlac_pipeline.checkpoint.step_sync import StepSync, StepSyncs
from dlac_pipeline.checkpoint.store import folder_name_of, tiers_of
from dlac_pipeline.elastic.ranks.process_group import join, serve_group_store
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE, REHEARSAL_VARIABLE, leave_reason
from dlac_pipeline.lakehouse.errors import DlacError, LossNotFinite, ScriptInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.pins import let_go
from dlac_pipeline.lakehouse.ledger.commits import Attempt, finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.read.batch import Batch, copy_batches
from dlac_pipeline.read.exchange import Waits, summing_over
from dlac_pipeline.read.open import open_leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.fetch_checkpoint import load_checkpoint
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter, Phase
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy
from dlac_pipeline.train.startup import (
    OwnRecoveries,
    await_resume_point,
    check_restored,
    claim_run,
    job_spec,
    make_own_folder,
    open_lakehouse,
)

_log = logging.getLogger(__name__)
_GROUP_TIMEOUT_S = 86_400.0
"""Seconds that ranks wait for each other: one may convert or fetch a large checkpoint. The supervisor ends hung ranks."""

_BACKGROUND_TAG = 1
"""The tag of messages between the threads that write a checkpoint in the background."""


@contextmanager
def training_run(spec: str | Path | None = None, *, takeover: bool = False) -> Iterator[TrainingRun]:
    """Yield the training run of this rank. The run joins the process group, gets its attempt, and cleans up at the end.

    A script may leave the context before the run is over, between two steps, at the same step on all ranks. The attempt then
    ends after a checkpoint.

    `takeover` fences off a live launch of the same run, which otherwise causes a refusal. Under `dlac train` the command
    decides it.

    Raises:
        SpecInvalid: neither a launch folder nor a spec describes the run.
        DlacError: from the claim, the plan or the resume point.
    """
    folder = Path(os.environ[LAUNCH_VARIABLE]) if LAUNCH_VARIABLE in os.environ else None
    with ExitStack() as held:
        run = TrainingRun(folder, job_spec(folder, spec), takeover=takeover, held=held)
        try:
            yield run
            run.leave()
        except BaseException as err:
            # Before the connections close: then other ranks fail at once, and are not the cause.
            if folder is not None:
                leave_reason(err)
            else:
                run.record_failure(err)  # without a supervisor
            raise
        finally:
            run.close()


class TrainingRun:
    """One rank of one attempt."""

    def __init__(self, folder: Path | None, spec: JobSpec, *, takeover: bool, held: ExitStack) -> None:
        """Join the run, for `training_run`. `held` keeps the resources that the run holds until it is closed."""
        self.spec = spec
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._events = EventWriter(folder, self.rank)
        self._first_of_machine = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        self._tiers = tiers_of(spec)
        self._waits = Waits()
        self._signs = HeartbeatWriter(folder, self.rank, self._waits)
        seed_rng(spec.order.seed, 0, 0)  # equal on all ranks until `restore`, so that models are initialized equally
        skip_shared_memory_op()
        self._patience = timedelta(seconds=max(_GROUP_TIMEOUT_S, spec.launch.hang_timeout_s))
        self._group = self._join()
        self._tree = RankTree(self.rank, self.world_size, self._group)
        self._behind = RankTree(self.rank, self.world_size, self._group, tag=_BACKGROUND_TAG)
        self._pulse = StepSyncs(self.world_size, self._group)
        self._when = CheckpointPolicy(spec, self.rank, folder, self._events)
        self._finiteness = FinitenessCheck(
            spec.run,
            "warn" if REHEARSAL_VARIABLE in os.environ else spec.launch.on_nonfinite_loss,
            warn=lambda message: self._events.write({"event": "warning", "message": message}),
        )
        held.callback(self._when.close)  # closed last: a dead peer must not keep this rank past its deadline
        self._lakehouse = open_lakehouse(spec, supervised=folder is not None)
        self._recoveries = OwnRecoveries(self._lakehouse, spec, self._events)
        if folder is None:
            self._claim_itself(takeover=takeover, held=held)
        else:
            self.resume_point = await_resume_point(folder)
        self._open_reader(self._lakehouse)
        self._when.resumed(self.resume_point, self._lakehouse)
        # A row may have killed the attempt before, and a device reports that some steps late. This attempt finds the step.
        self._pulse.waits_for_losses = self.resume_point.replaces > 0
        self._engine: Engine | None = None
        self._batch: Batch | None = None
        self._over = False

    def _claim_itself(self, *, takeover: bool, held: ExitStack) -> None:
        """Claim the run without a supervisor. Under another launcher the ranks still write heartbeats."""
        began = time.time()
        tiers = self._tiers if self._first_of_machine else None
        self.resume_point = point = claim_run(
            self._lakehouse, self.spec, self._tree, tiers, takeover=takeover, held=held
        )
        with failing_together(self._tree, doing="making the launch folder"):
            folder = make_own_folder(self.spec, point.nonce)
            self._signs.close()
            self._signs = HeartbeatWriter(folder, self.rank, self._waits)
        self._events.open(folder)
        if self.rank == 0:
            self._recoveries.begin(point, claimed_at=began)

    @property
    def stopped(self) -> bool:
        """True if the run was asked to stop and stops here, after a checkpoint if time allowed one."""
        return self._when.leaving is not None

    @property
    def step(self) -> int:
        """The last finished optimizer step."""
        return self._tracker.step

    @property
    def total_steps(self) -> int | None:
        """The last step of the run, or of its current leg if it follows appends. None if only reading can show it."""
        return self._order.total_steps

    @property
    def head(self) -> str | None:
        """Id of the last committed checkpoint."""
        return self._manager.head

    def restore(self, engine: object = None, **parts: Any) -> None:
        """Name the engine whose state is checkpointed, and load the resume point into it, if one exists.

        `engine` is a DeepSpeed engine, or an adapter such as `TorchState(model=model, optimizer=optimizer)`. Such parts may
        be passed alone. The job spec's `checkpoint.engine` then names the adapter ("auto": by whether the model is sharded).

        Raises:
            SpecInvalid, ScriptInvalid: the job spec names another engine, or the object is no engine.
            ResumeMismatch: the checkpoint was saved by another kind of engine.
            WorldSizeUnsupported: the saved state cannot be converted to this number of ranks.
            CheckpointUnsafe: the checkpoint contains more than tensors and plain values.
            StoreUnavailable, CheckpointDamaged: its files could not be brought to one of several nodes.
        """
        self._signs.doing(Phase.LOADING, self.step)
        self._engine = adapt(engine, self.spec.checkpoint.engine, **parts)
        point = self.resume_point
        if point.folder is None:
            seed_rng(self.spec.order.seed, 0, self.rank)
            return
        convert_s, load_s = load_checkpoint(
            self._engine, point, self.spec, self._tiers, self._tree, restores=self._first_of_machine
        )
        self._signs.loaded(convert_s=convert_s, load_s=load_s)

    def batches(
        self, *, device: torch.device | str | int | None = None, pin_memory: bool | None = None
    ) -> Iterator[Batch]:
        """Yield this rank's part of every remaining global batch, to the last step, or to a checkpoint after a stop request.

        Batches are copied to `device`, on a stream of their own. Without `device` they stay in CPU memory. `pin_memory` puts
        them into page-locked memory, by default if they go to an accelerator. Without an accelerator both have no effect.

        Raises:
            ScriptInvalid: `restore` was not called, or `step_done` was left out.
            SpecInvalid: the device is not on this node.
        """
        if self._engine is None:
            raise ScriptInvalid(
                "expected run.restore(engine) before run.batches(): without it nothing can be checkpointed"
            )
        self._signs.doing(Phase.TRAINING, self.step)
        self._events.write({"event": "training", "step": self.step, "total_steps": self.total_steps})
        self._when.training()
        self._recoveries.observe(self._signs, Phase.TRAINING)
        for batch in copy_batches(self._handed(), device=device, pin_memory=pin_memory):
            self._batch = batch
            yield batch
            if self._batch is not None:
                raise ScriptInvalid(f"expected run.step_done(loss) for step {batch.step} before the next batch")
            if self.stopped or batch.step == self.resume_point.rehearses_until:
                break
        if self.resume_point.rehearses_until:
            self._rehearsed()
        else:
            self._end()
        self._over = True

    def step_done(self, loss: torch.Tensor | float, *, applied: bool | None = None) -> None:
        """Record that the optimizer step of the last batch is done, and take a checkpoint when one is due.

        `loss` is this rank's `batch.mean(...)`. `applied` defaults to the engine's report. A loss on an accelerator is read
        when the next step is done, so that the rank does not wait for the device.

        Raises:
            ScriptInvalid: no batch is in hand.
            CheckpointError, LedgerError: a checkpoint, or the last one in progress, could not be taken.
            SpecInvalid: the state contains something that could not be loaded again.
        """
        engine, batch = self._engine, self._batch
        if engine is None or batch is None:
            raise ScriptInvalid("expected a batch from run.batches() before run.step_done(loss)")
        self._batch = None
        self._tracker.step_done(batch, applied=engine.step_applied() if applied is None else applied)
        says = self._when.step_done(batch.step, behind=self._manager.under_way)
        beat = self._pulse.step_done(batch.step, loss=loss, says=says)
        if beat is not None:
            self._on_sync(beat)
        self._signs.step_done(batch.step)
        self._recoveries.observe(self._signs, Phase.TRAINING)
        self._report(self._manager.done())
        reason = None if self.resume_point.rehearses_until else self._when.reason()
        if reason is not None:
            self._checkpoint(engine, reason, wait=self.stopped or self.spec.checkpoint.mode == "synchronous")

    def settle(self) -> None:
        """Wait for the checkpoint in progress, if one exists.

        Raises:
            CheckpointError, LedgerError: the checkpoint failed. The one before is untouched.
        """
        self._report(self._manager.settle())

    def leave(self) -> None:
        """Commit the steps that the script has trained, also if the script leaves before the run is over.

        Nothing is committed in the middle of a step or before `restore`, because the state of the model is unknown then.
        Raises as `settle` does.
        """
        self.settle()
        engine = self._engine
        if self._over or engine is None or self._batch is not None or self.resume_point.rehearses_until:
            return
        if self.stopped or self.step == self.total_steps:
            self._end()
            return
        if self.step > self._tracker.committed_step:
            self._checkpoint(engine, "left", wait=True)
        if self.stopped:  # requested by a message that was still in flight
            self._end()
            return
        self._events.write({"event": "left", "step": self.step, "total_steps": self.total_steps})
        self._signs.doing(Phase.DONE, self.step)

    def record_failure(self, err: BaseException) -> None:
        """Record without a supervisor that the run is given up, or that the recovery before the first step failed."""
        if self.rank == 0 and isinstance(err, LossNotFinite):
            self._recoveries.give_up(err, attempt=self._attempt.number, step=self.step)
        self._recoveries.fail()

    def close(self) -> None:
        """Close the reader and the heartbeat, and leave the process group."""
        self._reader.close()
        self._signs.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _end(self) -> None:
        assert self._engine is not None
        self.settle()
        if not self.stopped and (self._tracker.step > self._tracker.committed_step or self._leg_is_to_be_said()):
            self._checkpoint(self._engine, "end", wait=True)
        finished = not self.stopped and self._run_ends()
        if finished and self.rank == 0:
            finish(Ledger(self._lakehouse), self._attempt, step=self._tracker.step)
        self._tree.broadcast(b"done" if self.rank == 0 else None)
        if self.stopped:
            self._when.left()
        ending = "finished" if finished else "stopped" if self.stopped else "caught_up"
        self._events.write({"event": ending, "step": self._tracker.step})
        self._signs.doing(Phase.DONE, self._tracker.step)
        self._recoveries.observe(self._signs, Phase.DONE)
        if ending == "caught_up" and self.rank == 0:
            self._let_go_of_pins()

    def _let_go_of_pins(self) -> None:
        """Release the pins of earlier legs. A failure is left to the next launch, because all rows were committed."""
        for source in self.spec.sources:
            try:
                let_go(self._lakehouse, self.spec.run, source.table)
            except (DlacError, OSError) as err:
                _log.warning("expected to release pins that no run needs, found %s; the next launch tries again", err)

    def _rehearsed(self) -> None:
        """End a rehearsal: report its losses, commit nothing."""
        for beat in self._pulse.flush():
            self._on_sync(beat)
        told = {"losses": self._tracker.losses, "skipped": self._tracker.skipped}
        self._events.write({"event": "rehearsed", "step": self._tracker.step, **told})
        self._signs.doing(Phase.DONE, self._tracker.step)

    def _handed(self) -> Iterator[Batch]:
        """Yield the reader's batches, with a heartbeat before and after each."""
        reader = iter(self._reader)
        while True:
            self._signs.reading()
            batch = next(reader, None)
            if batch is None:
                return
            yield self._signs.handed(batch, counted=self._order.counted)

    def _leg_is_to_be_said(self) -> bool:
        """Return True if no checkpoint names the leg, because it had no batch. Its exclusions would be unknown."""
        point = self.resume_point
        unsaid = point.leg_is_new and self._manager.head == point.checkpoint_id
        return unsaid and (self._run_ends() or point.leaves_out_more)

    def _run_ends(self) -> bool:
        """Return True if the run is over at the end of its leg. A run that follows appends ends at `order.steps` only."""
        return not self._leg.following or (self._leg.steps is not None and self.step >= self._leg.steps)

    def _on_sync(self, beat: StepSync) -> None:
        self._tracker.losses += beat.losses
        self._signs.record_loss(beat.step, beat.losses[-1])
        self._when.on_sync(beat)
        self._finiteness.check_losses(beat, skipped=self._tracker.skipped)

    def _checkpoint(self, engine: Engine, reason: str, *, wait: bool) -> None:
        for beat in self._pulse.flush():
            self._on_sync(beat)
        if self.stopped:  # perhaps requested by a message that was still in flight
            told = self._when.reason()
            if told is None:
                return
            reason, wait = told, True
        with failing_together(self._tree, doing="checking the weights"):  # rank 0 records that the run is given up
            self._finiteness.check_weights(engine, self.step)
        self._signs.doing(Phase.CHECKPOINT, self.step)
        note = {**self._when.note(reason), "total_steps": self.total_steps}
        if wait:
            self.settle()
            self._report(self._manager.save(engine, self._tracker, note))
        else:
            self._report(self._manager.begin(engine, self._tracker, note))
        self._when.taken()
        self._pulse.waits_for_losses = False
        self._signs.doing(Phase.TRAINING, self.step)

    def _report(self, committed: Committed | None) -> None:
        if committed is not None:
            self._events.write(committed.event())
            self._when.committed(committed)
            self._signs.checkpoints(own_s=self._manager.own_s, own_bytes=self._manager.own_bytes)

    def _join(self) -> dist.ProcessGroup | None:
        if self.world_size == 1:
            serve_group_store()  # DeepSpeed makes a group of one rank
            return None
        join()
        return self._new_group()

    def _new_group(self) -> dist.ProcessGroup:
        """Make a group of all ranks for messages between CPUs. Collective."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._patience)
        return group

    def _open_reader(self, lakehouse: Lakehouse) -> None:
        point = self.resume_point
        leg = Leg.from_json(point.leg)
        opened = open_leg(lakehouse, leg, self.spec)
        self._leg, self._order = leg, opened.order
        state = opened.start_state() if point.leg_is_new else point.cursors
        if not point.leg_is_new:
            check_restored(self._order, point.step, state)
        apart = None if self._group is None or opened.order.counted else self._new_group()
        """Group for the lengths of batches: a script may read ahead in a thread, and collectives of a group need one order."""
        self._reader = opened.reader(
            rank=self.rank,
            world_size=self.world_size,
            step=point.step,
            state=state,
            exchange=summing_over(apart, self._waits),
        )
        groups = self._reader.groups
        self._tracker = ReaderStateTracker(
            committed_step=point.step,
            groups=groups,
            cursors=np.array([[source[group] for source in state] for group in groups], dtype=np.int64),
        )
        self._attempt = Attempt(run=self.spec.run, number=point.attempt, nonce=point.nonce)
        trained = AttemptLeg(
            attempt=self._attempt,
            leg=leg,
            is_new=point.leg_is_new,
            order=opened.order_apart(),
            parent=point.checkpoint_id,
            parent_folder=None if point.checkpoint_id is None else folder_name_of(point.manifest_uri),
        )
        self._manager = open_manager(
            self.spec,
            trained,
            lakehouse=lakehouse,
            tiers=self._tiers,
            tree=self._tree,
            behind=self._behind,
            evicts=self._first_of_machine,
        )
