"""Checkpoints of a training run: loaded into the script's engine, taken when the policy has a reason, and reported."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dlac_pipeline.checkpoint.data_parallel import SharedBatches, check_layout, check_weights_agree
from dlac_pipeline.checkpoint.engines import Engine, adapt, prepare_engines
from dlac_pipeline.checkpoint.finiteness import FinitenessCheck
from dlac_pipeline.checkpoint.manager import Committed
from dlac_pipeline.checkpoint.rng import seed_rng
from dlac_pipeline.checkpoint.step_sync import StepSync
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.memory_states.save import MemorySaves
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy
from dlac_pipeline.train.loss_watch import open_watch
from dlac_pipeline.train.open_attempt import OpenAttempt
from dlac_pipeline.train.restored_state import RestoredGenerators, load_state


def prepare_process(spec: JobSpec) -> None:
    """Seed the random generators equally on all ranks, so that models are initialized equally, before anything is loaded."""
    seed_rng(spec.order.seed, 0, 0)
    prepare_engines()


class Checkpointing:
    """Engine of a rank, its finished steps, and the checkpoints after them. Its methods are collective."""

    def __init__(
        self,
        spec: JobSpec,
        attempt: OpenAttempt,
        communicator: Communicator,
        policy: CheckpointPolicy,
        heartbeat: HeartbeatWriter,
        write_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self.engine: Engine | None = None
        """The script's engine, once it is restored."""
        self._generators: RestoredGenerators | None = None
        self._weights_agree = False
        """True once the ranks have compared their weights, after the first step."""
        self._spec = spec
        self._attempt = attempt
        self._communicator = communicator
        self._tracker, self._manager = attempt.tracker, attempt.manager
        self._step_syncs = communicator.step_syncs
        # A row may have killed the attempt before, and a device reports that some steps late. This attempt finds the step.
        self._step_syncs.waits_for_losses = attempt.point.replaces > 0
        self._policy = policy
        self._heartbeat = heartbeat
        self._write_event = write_event
        self._memory = MemorySaves(spec, attempt.point, communicator, attempt.tracker, attempt.manager, self._warn)
        mesh, transforms = spec.launch.mesh, [each.transform for each in spec.sources if each.transform]
        shared = SharedBatches(communicator.coordinate.index, communicator.tree, transforms)
        self.shared_batches = shared if mesh.replica_ranks > 1 else None
        """The batches of ranks that read one share. None: no two ranks do."""
        self.losses = open_watch(spec, attempt, communicator.tree, self._warn)
        on_nonfinite = "warn" if attempt.rehearses else spec.launch.on_nonfinite_loss
        self._finiteness = FinitenessCheck(spec.run, on_nonfinite, warn=self._warn)

    def restore(self, engine: object, parts: Mapping[str, Any]) -> None:
        """Take the script's engine, and load the checkpoint of the resume point into it."""
        adapted = adapt(engine, self._spec.checkpoint.engine, **parts)
        tree, restores = self._communicator.tree, self._communicator.is_first_of_node
        check_layout(adapted, tree, self._spec.launch.mesh)
        adapted.take_ranks(tree, lists=restores)
        convert_s, load_s = load_state(
            adapted,
            self._attempt.point,
            self._attempt.memory,
            self._spec,
            tree,
            restores=restores,
            check_weights=partial(self._finiteness.check_weights, adapted, self._attempt.step),
        )
        self._generators = RestoredGenerators()
        self._heartbeat.loaded(convert_s=convert_s, load_s=load_s)
        restored = self._attempt.memory
        self._memory.begin(adapted, None if restored is None else restored.state)
        # not before: a script that keeps an error to itself has not the state of the resume point
        self._take_engine(adapted)

    def _take_engine(self, engine: Engine) -> None:
        """Take an engine that is loaded, and watch the steps of its optimizers."""
        self.engine = engine
        self._manager.watch_steps(engine)
        self._manager.gate.is_sure = False if self._attempt.point.copies_at_once else None

    def reset_generators(self) -> None:
        """Set the random generators to their state after `restore`, once."""
        if self._generators is not None:
            self._generators.reset()
            self._generators = None

    def record_step(self, batch: Batch, loss: torch.Tensor | float | None, *, applied: bool | None) -> None:
        """Record that the optimizer step of a batch is done, and receive the messages of all ranks that have arrived."""
        self._manager.gate.finish()
        if applied is None:
            applied = self._restored_engine().step_applied()
        self._tracker.step_done(batch, applied=applied)
        if not self._weights_agree:
            check_weights_agree(self._restored_engine(), self._communicator.tree, self._spec.launch.mesh)
            self._weights_agree = True
        if self.shared_batches is not None:
            self.shared_batches.compare(batch.step)
        self._memory.step_done()
        self._memory.wait_for_copy(lambda: self._policy.is_asked)
        report = self._policy.step_done(batch.step, in_background=self._manager.under_way)
        sync = self._step_syncs.step_done(batch.step, loss=loss, report=self._memory.report(report))
        if sync is not None:
            self._on_sync(sync)
        self._heartbeat.step_done(batch.step)  # after the loss was read: an error of the device is one of these rows
        if self._memory.is_due(batch.step):
            self.receive_all()  # now, because a message may ask for a checkpoint
        self._memory.return_to_script()

    def due_reason(self) -> str | None:
        """Return the policy's reason for a checkpoint after the last finished step, or None. A rehearsal takes none."""
        self._report(self._manager.done())
        return None if self._attempt.rehearses else self._policy.reason()

    def take(self, reason: str, *, wait: bool = False) -> None:
        """Take a checkpoint after the last finished step. With `wait`, or in synchronous mode, it is committed on return."""
        self.receive_all()
        ends = wait or self._policy.leaving is not None
        if self._policy.leaving is not None:  # perhaps requested by a message that was still in flight
            reason = self._policy.reason() or ""
            if not reason:
                return
        wait = ends or self._spec.checkpoint.mode == "synchronous"
        engine, step, started = self._restored_engine(), self._attempt.step, time.monotonic()
        self._heartbeat.doing(Phase.CHECKPOINT, step)
        note = {**self._policy.note(reason), "total_steps": self._attempt.total_steps}
        weights = self._finiteness.weights_of(engine, step)
        self.settle()
        if wait:
            self._report(self._manager.save(engine, self._tracker, note, weights, since=started))
        else:
            self._manager.begin(engine, self._tracker, note, weights, since=started)
        self._memory.pause()
        self._policy.taken()
        if not ends:  # the state before it is older than the checkpoint, or all that a failure leaves until the commit
            self.keep_in_memory()
        self._step_syncs.waits_for_losses = False
        self._heartbeat.doing(Phase.TRAINING, step)

    def keep_in_memory(self) -> None:
        """Save a memory state after the last finished step if one is due. Hold the step for a failure."""
        engine, rows = self._restored_engine(), self._heartbeat.rows
        if self._memory.is_due(self._attempt.step):
            self._memory.save(engine, rows=rows)
        self._memory.hold(engine, self._step_syncs.unknown_losses(), rows=rows)

    def keep_last_step(self) -> None:
        """Save a memory state after the last finished step, because this rank ends with a failure."""
        self._memory.keep_last()

    def forget_memory(self) -> None:
        """Remove the memory states of the run on this node at its end, if a checkpoint has the last step."""
        self._memory.end(committed=self._attempt.step == self._tracker.committed_step)

    def close(self) -> None:
        """End the copies beside training, and close the files of memory states."""
        self._manager.gate.finish()
        self._memory.close()

    def discard_memory(self) -> None:
        """Remove the memory states of the run on this node, because training is not to continue from them."""
        self._memory.end(committed=True)

    def receive_all(self) -> None:
        """Wait for the messages about every finished step."""
        for sync in self._step_syncs.flush():
            self._on_sync(sync)

    def settle(self) -> None:
        """Wait for the checkpoint in progress, if one exists. Raises as `CheckpointManager.settle`."""
        self._report(self._manager.settle())

    def _restored_engine(self) -> Engine:
        assert self.engine is not None, "a script restores its engine before the first batch"
        return self.engine

    def _on_sync(self, sync: StepSync) -> None:
        self._tracker.losses += sync.losses
        self._heartbeat.record_loss(sync.step, sync.losses[-1])
        self._policy.on_sync(sync)
        self._memory.on_sync(sync)
        if self.losses is not None:
            self.losses.check(sync, skipped=self._tracker.skipped)
        self._finiteness.check_losses(sync, skipped=self._tracker.skipped)

    def _warn(self, message: str) -> None:
        self._write_event({"event": "warning", "message": message})

    def _report(self, committed: Committed | None) -> None:
        if committed is not None:
            losses = {"losses": committed.losses} if self._spec.event_receiver() is not None else {}
            self._write_event({**committed.event(), **losses})
            self._policy.committed(committed)
            self._heartbeat.checkpoints(own_s=self._manager.own_s, own_bytes=self._manager.own_bytes)
