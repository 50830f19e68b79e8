"""Training run of a script: `training_run()` provides resumed batches, tracking, and checkpoints. The README has an example.

Under `dlac train` the launch folder names the run and the rank. Under torchrun or the `deepspeed` launcher, pass the job
spec: `training_run("job.toml")`. Rank 0 then claims the run itself.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE, leave_reason
from dlac_pipeline.elastic.ranks.this_process import stated_world_size, this_process
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import LossNotFinite, LossSpiked, ScriptInvalid
from dlac_pipeline.read.batch import Batch, copier_to
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter
from dlac_pipeline.supervise.ranks.healing import healing_of
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.train import leg_switch, startup
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy
from dlac_pipeline.train.checkpointing import Checkpointing, prepare_process
from dlac_pipeline.train.open_attempt import OpenAttempt, open_attempt
from dlac_pipeline.train.own_reports import OwnRecoveries, start_listeners

LOADERS = Door("dlac.loaders", "loader")
"""An entry has the arguments of `TrainingRun.loader` after the run, and returns a `TrainerLoader`."""


class TrainerLoader(Protocol):
    """The batches of a run for a trainer that has the loop."""

    def __iter__(self) -> Iterator[Any]:
        """Yield what the trainer takes of each remaining batch or micro-batch. It takes them from `TrainingRun.batches`."""

    def check_weights(self, *, always_full: bool) -> None:
        """Check the losses of the step that was done. `always_full`: no batch of the run has an empty slot.

        Raise `ScriptInvalid` if a loss lacks the weight of its micro-batch.
        """


@contextmanager
def training_run(
    spec: str | Path | None = None, *, takeover: bool = False, mesh: DeviceMesh | None = None
) -> "Iterator[TrainingRun]":
    """Yield the training run of this rank. The run joins the process group, gets its attempt, and cleans up at the end.

    A script may leave the context before the run is over, between two steps, at the same step on all ranks. The attempt then
    ends after a checkpoint.

    `takeover` fences off a live launch of the same run, which otherwise causes a refusal. Under `dlac train` the command
    decides it. `mesh` is the mesh of a script that makes its own, in place of `launch.mesh`.

    Raises:
        SpecInvalid: neither a launch folder nor a spec describes the run, or the launch has another mesh.
        DlacError: from the claim, the plan or the resume point.
    """
    folder = Path(os.environ[LAUNCH_VARIABLE]) if LAUNCH_VARIABLE in os.environ else None
    with ExitStack() as held:
        job = startup.job_spec(folder, spec, world_size=stated_world_size(), device_mesh=mesh)
        healing = healing_of(job.launch)
        kind: type[TrainingRun] = TrainingRun if healing is None else healing.run_type()
        run = kind(folder, job, takeover=takeover, held=held)
        try:
            yield run
            run.leave()
        except BaseException as err:
            # Before the connections close: then other ranks fail at once, and are not the cause.
            is_of_loss = isinstance(err, LossNotFinite | LossSpiked)
            if is_of_loss:
                run.discard_memory()
            if folder is not None:
                leave_reason(err)
            else:
                run.record_failure(err)  # without a supervisor
            if not is_of_loss:
                run.keep_last_step()
            raise
        finally:
            run.close()


class TrainingRun:
    """A rank of an attempt."""

    ends_with_launcher = True
    """True if the attempt ends when the launcher of a rank does, where no supervisor watches the ranks."""

    def __init__(self, folder: Path | None, spec: JobSpec, *, takeover: bool, held: ExitStack) -> None:
        """Join the run, for `training_run`. `held` keeps the resources that the run holds until it is closed."""
        self.spec = spec
        process = this_process(spec.launch.mesh)
        self.rank = process.rank_of_all
        self._folder = folder
        self._events = EventWriter(folder, process.rank)
        self._heartbeat = HeartbeatWriter(folder, self.rank)
        prepare_process(spec)
        hang_timeout_s = spec.launch.hang_timeout_s
        self._communicator = Communicator(process, self._heartbeat.waits, hang_timeout_s=hang_timeout_s)
        self.world_size = self._communicator.world_size
        self.coordinate = self._communicator.coordinate
        """Share of each global batch that this rank reads."""
        self._policy = CheckpointPolicy(
            spec, process.rank, folder, self._events, ends_with_launcher=self.ends_with_launcher
        )
        held.callback(self._policy.close)  # closed last: a dead peer must not keep this rank past its deadline
        self._plans = startup.open_plans(spec, supervised=folder is not None)
        self._lakehouse = self._plans.lakehouse
        self._recoveries = OwnRecoveries(self._lakehouse, spec, self._events)
        if folder is None:
            self._claim_itself(takeover=takeover, held=held)
        else:
            self.resume_point = startup.await_resume_point(folder)
        self._attempt, self._checkpointing = self._open()
        self._policy.resumed(self.resume_point)
        self._batch: Batch | None = None
        self._loader: TrainerLoader | None = None
        self._follower: leg_switch.Follower | None = None
        self._due_reason: str | None = None
        self._is_unfinished = False
        """True after a step whose checkpoint or memory state, if one is due, is not taken yet."""
        self._over = False

    def _open(self) -> tuple[OpenAttempt, Checkpointing]:
        """Open this rank's part of the attempt."""
        spec, communicator = self.spec, self._communicator
        attempt = open_attempt(spec, self._plans, self.resume_point, communicator)
        return attempt, Checkpointing(spec, attempt, communicator, self._policy, self._heartbeat, self._events.write)

    def _claim_itself(self, *, takeover: bool, held: ExitStack) -> None:
        """Claim the run without a supervisor. Under another launcher the ranks still write a heartbeat."""
        began = time.time()
        self.resume_point = point = startup.claim_run(
            self._plans, self.spec, self._communicator, takeover=takeover, held=held
        )
        folder, self._heartbeat = startup.move_to_own_folder(
            self.spec, point.nonce, self._communicator, self._heartbeat, self.rank
        )
        self._events.open(folder)
        if self.rank == 0:
            start_listeners(self._plans, self.spec, point, self._events, folder, held)
            self._recoveries.begin(point, claimed_at=began)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as launch.mesh has them, with the dimensions "pp", "dp", "cp" and "tp". The first use is collective."""
        spec = self.spec.launch.mesh
        return _device_mesh(pp=spec.pp, dp=self.coordinate.count, cp=spec.cp, tp=spec.tp)

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks with the dimensions "pp", "efsdp" and "ep": `efsdp` has what `ep` leaves of a stage.

        Experts are split over "ep" and sharded over "efsdp". The first use is collective.
        """
        spec = self.spec.launch.mesh
        return _device_mesh(pp=spec.pp, efsdp=self.world_size // spec.pp // spec.ep, ep=spec.ep)

    @property
    def stopped(self) -> bool:
        """True if the run was asked to stop and stops here, after a checkpoint if time allowed one."""
        return self._policy.leaving is not None

    @property
    def step(self) -> int:
        """The last finished optimizer step."""
        return self._attempt.step

    @property
    def total_steps(self) -> int | None:
        """The last step of the run, or of its current leg if it follows appends. None if only reading can show it.

        With `launch.on_skipped = "replay"` each skipped step adds one.
        """
        return self._attempt.total_steps

    @property
    def position(self) -> dict[str, Any]:
        """The last finished step, and what makes it comparable: run, leg and plans."""
        leg = self._attempt.leg
        plans = [plan for source in leg.sources for plan in source.start.live_plan_ids]
        return {"run": self.spec.run, "leg": leg.index, "plans": plans, "step": self.step}

    @property
    def head(self) -> str | None:
        """Id of the last committed checkpoint."""
        return self._attempt.manager.head

    def restore(self, engine: object = None, **parts: Any) -> None:
        """Name the engine whose state is checkpointed, and load the resume point into it, if one exists.

        `engine` is a DeepSpeed engine, or an adapter such as `TorchState(model=model, optimizer=optimizer)`. Such parts may
        be passed alone. The job spec's `checkpoint.engine` then names the adapter ("auto": by whether the model is sharded).

        Raises:
            SpecInvalid, ScriptInvalid: the job spec names another engine, the object is no engine, or this is the second call.
            ResumeMismatch: the checkpoint was saved by another kind of engine.
            WorldSizeUnsupported: the saved state cannot be converted to this number of ranks.
            CheckpointUnsafe: the checkpoint contains more than tensors and plain values.
            StoreUnavailable, CheckpointDamaged: its files could not be brought to one of several nodes.
        """
        if self._checkpointing.engine is not None:
            raise ScriptInvalid(
                "expected one run.restore with all parts of the state, found a second one: it would load the resume point over "
                "what was trained since, and leave the parts of the first call out of checkpoints"
            )
        self._heartbeat.doing(Phase.LOADING, self.step)
        self._checkpointing.restore(engine, parts)

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
        if self._checkpointing.engine is None:
            raise ScriptInvalid(
                "expected run.restore(engine) before run.batches(): without it nothing can be checkpointed"
            )
        self.finish_step()  # a script may have left another loop after its last step
        if self._over or self.stopped:  # a trainer begins another epoch, perhaps after a request to stop
            return
        self._heartbeat.doing(Phase.TRAINING, self.step)
        self._events.write({"event": "training", "step": self.step, "total_steps": self.total_steps})
        self._policy.training()
        self._recoveries.observe(self._heartbeat, Phase.TRAINING)
        resumes = self.step > 0
        copy = copier_to(device, pin_memory=pin_memory)
        for watched in self._watched_batches():
            self._batch = batch = copy(watched)
            if resumes:
                self.reset_generators()  # what the script drew since `restore`, it had drawn before the checkpoint too
            yield batch
            if self._batch is not None:
                raise ScriptInvalid(f"expected run.step_done(loss) for step {batch.step} before the next batch")
            self.finish_step()
            if self.stopped or batch.step == self.resume_point.rehearses_until:
                break
        if self._attempt.rehearses:
            self._end_rehearsal()
        else:
            self._end()
        self._over = True

    def step_done(self, loss: torch.Tensor | float | None, *, applied: bool | None = None) -> None:
        """Record that the optimizer step of the last batch is done.

        A checkpoint that is due is taken when the script asks for the next batch, or leaves. So it has what the script does in
        between: a step of the learning rate, an average of the weights, an evaluation that draws random numbers.

        `loss` is this rank's `batch.mean(...)`, or None at a stage of a pipeline before the last one. `applied` defaults to the
        engine's report. A loss on an accelerator is read when the next step is done, so that no rank waits for its device.

        Raises:
            ScriptInvalid: no batch is in hand, or the loss is None at another rank.
            CheckpointError, LedgerError: the last checkpoint in progress could not be taken.
        """
        self.record_step(loss, applied=applied)

    def record_step(self, loss: torch.Tensor | float | None, *, applied: bool | None = None) -> bool:
        """Do what `step_done` does. Return True if a checkpoint is due.

        A trainer that saves by itself then calls `checkpoint`. It may also do so after a step at which none is due.
        """
        batch = self._batch
        if batch is None:
            raise ScriptInvalid("expected a batch from run.batches() before run.step_done(loss)")
        if loss is None and self.spec.launch.mesh.is_last_stage(self.rank, self.world_size):
            raise ScriptInvalid(
                f"expected a loss of step {batch.step} from rank {self.rank}, found None: pass the loss. Ranks with an "
                "earlier stage of a pipeline alone may pass None"
            )
        if self._loader is not None and loss is not None:
            self._loader.check_weights(always_full=self._attempt.order.always_full)
        self._checkpointing.record_step(batch, loss, applied=applied)
        self._batch = None  # not before: after an error that the script keeps to itself, nothing may be committed
        self._recoveries.observe(self._heartbeat, Phase.TRAINING)
        self._due_reason = self._checkpointing.due_reason()
        self._is_unfinished = True
        return self._due_reason is not None

    def finish_step(self) -> None:
        """Take the checkpoint, or save the memory state, that is due after the last finished step. Collective.

        The request for the next batch and the end of the run do so. A trainer calls it where it has ended its work on a step.

        Raises:
            CheckpointError, LedgerError: the checkpoint, or the one in progress, could not be taken.
            SpecInvalid: the state contains something that could not be loaded again.
        """
        if not self._is_unfinished:
            return
        if self._due_reason is not None:
            self.checkpoint()
            return
        self._is_unfinished = False
        self._checkpointing.keep_in_memory()

    def checkpoint(self) -> None:
        """Take a checkpoint after the last finished step, unless it has one. Collective. Raises as `finish_step` does.

        Raises:
            ScriptInvalid: a batch is in hand, so the model may have a part of its step.
        """
        if self._batch is not None:
            raise ScriptInvalid(
                f"expected run.checkpoint() after run.step_done(loss) of step {self._batch.step}, found it before: the model may "
                "have rows of that batch, which the ledger would not name"
            )
        self._is_unfinished = False
        attempt = self._attempt
        if attempt.step > attempt.tracker.committed_step and not attempt.rehearses:
            self._checkpointing.take(self._due_reason or "trainer")
        self._due_reason = None

    def loader(
        self,
        inputs: Callable[[Batch], Any] | None = None,
        *,
        micro_batches: int = 1,
        device: torch.device | str | int | None = None,
    ) -> Any:
        """Return the run's batches as the loader of a trainer that has the loop.

        `micro_batches` is the number of parts in which a trainer that accumulates gradients gets each batch. `inputs` makes what
        the trainer takes of a part, by default the part itself. Parts have samples only, so that parts of a batch that is not
        full are shorter. Their losses are `batch.mean(...)`, or a mean times `batch.weight`.
        """
        make = LOADERS.load("micro_batches", setting="run.loader")
        self._loader = make(self, inputs, micro_batches=micro_batches, device=device)
        return self._loader

    def reset_generators(self) -> None:
        """Set the random generators to their state after `restore`, once: the script may have drawn numbers since."""
        self._checkpointing.reset_generators()

    def settle(self) -> None:
        """Wait for the checkpoint in progress. Raise its `CheckpointError` or `LedgerError`: the one before is untouched."""
        self._checkpointing.settle()

    def leave(self) -> None:
        """Commit the steps that the script has trained, also if the script leaves before the run is over.

        Nothing is committed in the middle of a step or before `restore`, because the state of the model is unknown then.
        Raises as `finish_step` does.
        """
        self.finish_step()
        self.settle()
        restored = self._checkpointing.engine is not None
        if self._over or not restored or self._batch is not None or self._attempt.rehearses:
            return
        if self.stopped or self.step == self.total_steps or not self._leave_early():
            self._end()

    def discard_memory(self) -> None:
        """Remove the memory states of the run: a loss that ends it came of them."""
        self._checkpointing.discard_memory()

    def keep_last_step(self) -> None:
        """Keep the state after the last finished step in memory: this rank has failed, or another one."""
        self._checkpointing.keep_last_step()

    def record_failure(self, err: BaseException) -> None:
        """Record without a supervisor that the run is given up, or that the recovery before the first step failed."""
        if self.rank == 0 and isinstance(err, LossNotFinite | LossSpiked):
            self._recoveries.give_up(err, attempt=self.resume_point.attempt, step=self.step)
        self._recoveries.fail()

    def close(self) -> None:
        """Close files, the reader and the heartbeat, and leave the process group."""
        if self._follower is not None:
            self._follower.close()
        self._checkpointing.close()
        self._attempt.reader.close()
        self._heartbeat.close()
        self._communicator.close()

    def _leave_early(self) -> bool:
        """Commit the last steps. Return False if the run was asked to stop by a message that was still in flight."""
        if self.step > self._attempt.tracker.committed_step:
            self._checkpointing.take("left", wait=True)
        if self.stopped:
            return False
        self._events.write({"event": "left", "step": self.step, "total_steps": self.total_steps})
        self._checkpointing.forget_memory()
        self._heartbeat.doing(Phase.DONE, self.step)
        return True

    def _end(self) -> None:
        """Commit the rest, and finish the run if nothing is left to train. Collective."""
        self.settle()
        attempt = self._attempt
        if not self.stopped and (attempt.step > attempt.tracker.committed_step or attempt.has_unrecorded_leg):
            self._checkpointing.take("end", wait=True)
        ending = attempt.end_run(self._communicator, stopped=self.stopped)
        self._checkpointing.forget_memory()
        if self.stopped:
            self._policy.left()
        self._events.write({"event": ending, "step": attempt.step})
        self._heartbeat.doing(Phase.DONE, attempt.step)
        self._recoveries.observe(self._heartbeat, Phase.DONE)
        if ending == "caught_up" and self._communicator.rank == 0:
            self._plans.release_old_pins(self.spec.run, [source.table for source in self.spec.sources])

    def _end_rehearsal(self) -> None:
        """Report the losses of a rehearsal. Nothing is committed."""
        self._checkpointing.receive_all()
        tracker = self._attempt.tracker
        samples = [] if self._checkpointing.losses is None else self._checkpointing.losses.gather(tracker.step)
        results = {"losses": tracker.losses, "skipped": tracker.skipped, "samples": samples}
        self._events.write({"event": "rehearsed", "step": tracker.step, **results})
        self._heartbeat.doing(Phase.DONE, tracker.step)

    def _watched_batches(self) -> Iterator[Batch]:
        """Yield the batches of all legs, with a heartbeat before and after each."""
        self._follower = self._follower or self._open_follower()
        yield from self._batches_of_leg()
        while self._follower is not None and self._follower.enter_next():
            yield from self._batches_of_leg()

    def _open_follower(self) -> leg_switch.Follower | None:
        switch = leg_switch.LegSwitch(
            spec=self.spec,
            attempt=self._attempt,
            checkpointing=self._checkpointing,
            communicator=self._communicator,
            policy=self._policy,
            heartbeat=self._heartbeat,
            events=self._events,
        )
        return leg_switch.open_follower(switch)

    def _batches_of_leg(self) -> Iterator[Batch]:
        self._heartbeat.reading()
        for batch in self._attempt.reader:
            handed = self._heartbeat.handed(
                batch, counted=self._attempt.order.counted, speaks=self._communicator.speaks
            )
            if self._checkpointing.shared_batches is not None:
                self._checkpointing.shared_batches.note(handed)
            losses = self._checkpointing.losses
            yield handed if losses is None else losses.watch(handed)
            self._heartbeat.reading()


def _device_mesh(**sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks, on the accelerator if there is one. Collective."""
    device = torch.accelerator.current_accelerator()
    return init_device_mesh(
        "cpu" if device is None else device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )
