"""A tiny model trained by replica groups on a table of (row_id, x), with a journal of its own.

With `sharded` the ranks of a group share out the model. Params, each "RANK:STEP", end a process by SIGKILL in a step:

- `dies_starting` (before it has a state, at step 0)
- `dies_forward`, `dies_reducing` (in the second all-reduce), `dies_committed` (before the optimizer changes the model)
- `kills_lighthouse` (before the forward pass; the process itself lives on)
- `hangs` (before the forward pass, by SIGSTOP)
- `dies_saving` (while a checkpoint is written), `dies_recorded` (the ledger has the checkpoint, and the process does not know)

`dies_healing` is "source" or "newcomer". With `loses_states` no newcomer of the first attempt receives a state. With `darkens`
the new process kills the lighthouse before it meets its peers. With `awaits` = "RANK:STEP" the new process of that rank takes
part after that step. With `dies_again` = "RANK:STEP" that process dies as well.

The journal has a line for each share that a rank read, and one for each step that it committed, as evidence that is independent
of DLAC.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchft
import yaml
from torch.distributed.fsdp import fully_shard

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.commit import coordinator
from dlac_pipeline.extensions.replicas.peers import StateServer
from dlac_pipeline.extensions.replicas.rank import REJOINS_VARIABLE, read_lighthouse
from dlac_pipeline.extensions.sharded.torchft_state import TorchFTState
from dlac_pipeline.lakehouse.ledger import commits
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeat

UNDER_TORCHRUN = "DLAC_LAUNCH" not in os.environ
RESTARTED = UNDER_TORCHRUN and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
REJOINS = RESTARTED or REJOINS_VARIABLE in os.environ or "JOINS_LATE" in os.environ


def launch_folder() -> Path:
    """Return the launch folder. Under torchrun the run's folder names it."""
    if not UNDER_TORCHRUN:
        return Path(os.environ["DLAC_LAUNCH"])
    spec = yaml.safe_load(Path(os.environ["JOB_SPEC"]).read_text())
    run_folder = Path(spec["checkpoint"]["local"], spec["run"])
    return run_folder / (run_folder / "launch-of-groups").read_text()


def die() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingState(TorchFTState):
    """State whose process may die while it is saved, or sent to a newcomer."""

    dies_saving = False
    healing = ""

    def save(self, *arguments: Any) -> None:
        """Save, or die half-way."""
        super().save(*arguments)
        if self.dies_saving:
            die()

    def peer_state(self) -> dict[str, Any]:
        """Return the state, or die while a newcomer waits for it. Only one process does."""
        if self.healing == "source" and not REJOINS and first_to_claim("source"):
            die()
        return super().peer_state()

    def load_peer_state(self, state: Any) -> None:
        """Load half of the state, or all of it."""
        if self.healing == "newcomer" and first_to_claim("newcomer"):
            die()
        super().load_peer_state(state)


def first_to_claim(name: str) -> bool:
    """Return True in one process of the run."""
    try:
        (launch_folder() / f"claimed-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write(run: dlac.TrainingRun, **facts: Any) -> None:
    """Append a line to this process's journal."""
    path = Path(run.spec.params["journal"]) / f"{run.spec.run}-{run.rank}-{os.getpid()}.jsonl"
    with path.open("a") as stream:
        stream.write(json.dumps({"rank": run.rank, **facts}) + "\n")


def is_now(run: dlac.TrainingRun, param: str, step: int) -> bool:
    """Return True in the rank (or * for all) and step that a param names, before its process or attempt was replaced."""
    named = run.spec.params.get(param) in (f"{run.rank}:{step}", f"*:{step}")
    return named and not REJOINS and run.resume_point.attempt == 1


def lose_state(*_arguments: Any, **_options: Any) -> None:
    """Fail in place of receiving a state."""
    raise OSError("the network is away")


def die_reducing() -> None:
    """Die in the second all-reduce from now on."""
    allreduce, calls = torchft.Manager.allreduce, []

    def dying(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            die()
        return allreduce(*arguments, **options)

    torchft.Manager.allreduce = dying


def die_recorded() -> None:
    """Die after the next commit of the ledger, before this process has its answer."""
    commit = commits.commit_checkpoint

    def dying(*arguments: Any, **options: Any) -> Any:
        commit(*arguments, **options)
        die()

    vars(coordinator)["commit_checkpoint"] = dying


def kill_lighthouse() -> None:
    """Kill the lighthouse."""
    lighthouse = read_lighthouse(launch_folder())
    assert lighthouse is not None
    os.kill(lighthouse.pid, signal.SIGKILL)


def fail_before_forward(run: dlac.TrainingRun, step: int) -> None:
    """Die, hang or kill the lighthouse if a param requests it."""
    if is_now(run, "kills_lighthouse", step):
        kill_lighthouse()
    if is_now(run, "hangs", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_now(run, "dies_forward", step):
        die()


def wait_for(rank: int, ready: Callable[[RankHeartbeat], bool]) -> None:
    """Wait for a heartbeat of a rank."""
    while (found := read_heartbeat(launch_folder(), rank)) is None or not ready(found):
        time.sleep(0.01)


def train(run: dlac.TrainingRun) -> None:
    """Train to the end of the order."""
    params = run.spec.params
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(float(params.get("dropout", "0"))), torch.nn.Linear(8, 1)
    )
    for layer in (model[0], model[2], model) if "sharded" in params else ():
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = DyingState(model=model, optimizer=optimizer)
    state.healing = params.get("dies_healing", "")
    if params.get("loses_states") and REJOINS and run.resume_point.attempt == 1:
        server: Any = StateServer
        server.recv_checkpoint = lose_state
    run.restore(state)
    if REJOINS and "darkens" in params and first_to_claim("darkens"):
        kill_lighthouse()
    awaited, at = (int(each) for each in params.get("awaits", "-1:-1").split(":"))
    third = REJOINS and (launch_folder() / "claimed-again").exists()
    at += 30 * third  # of a group that has died again
    if REJOINS and run.rank == awaited:  # its peers do not know it yet
        other = (awaited + run.spec.launch.ranks_per_replica) % run.spec.launch.world_size
        wait_for(other, lambda peer: max(peer.spent.in_hand, peer.step) >= at)
    for batch in run.batches():
        step, rows = batch.step, batch["row_id"][batch.valid].tolist()
        if step == at and not REJOINS:
            wait_for(awaited, lambda peer: peer.phase == Phase.LOADING and peer.spent.in_hand == 0)
            time.sleep(0.2)  # its request is on its way to the lighthouse
        fail_before_forward(run, step)
        if params.get("dies_again") == f"{run.rank}:{step}" and REJOINS and first_to_claim("again"):
            die()
        if is_now(run, "dies_reducing", step):
            die_reducing()
        if is_now(run, "dies_recorded", step):
            die_recorded()
        features = batch["x"].to(torch.float32)
        target = features.sum(-1) + torch.sin(
            7.0 * batch["row_id"]
        )  # no model predicts it, so the loss does not vanish
        loss = batch.mean((model(features).squeeze(-1) - target) ** 2)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        write(run, event="share", step=step, rows=rows, ranks=batch.readers, pid=os.getpid(), at=time.time())
        time.sleep(float(params.get("pause_s", "0")))
        if state.reduce(loss):
            if is_now(run, "dies_committed", step):
                die()
            optimizer.step()
            write(run, event="committed", step=step, ranks=batch.readers, pid=os.getpid(), at=time.time())
        state.dies_saving = is_now(run, "dies_saving", step)
        run.step_done(loss)


if __name__ == "__main__":
    with dlac.training_run(os.environ.get("JOB_SPEC")) as the_run:
        if is_now(the_run, "dies_starting", 0):
            die()
        train(the_run)
