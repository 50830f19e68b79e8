"""Startup of a rank: its job spec, its lakehouse, and its resume point. Without a supervisor rank 0 claims the run."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from dlac_pipeline.checkpoint.collectives import failing_together
from dlac_pipeline.checkpoint.data_parallel import mesh_spec_of
from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint, resume_point_of
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.lakehouse import config, errors
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.lakehouse.retrying import RETRY_WITHIN_S, retrying
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec, parse_recorded, parse_spec, read_spec
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.ranks.launch_folders import KEEP_LAUNCHES, forget_launches, make_launch_folder
from dlac_pipeline.supervise.start.request import ClaimRequest, ResumeOptions
from dlac_pipeline.supervise.start.start_attempt import start_attempt

_FIRST_LOOK_S, _LOOK_S = 0.02, 0.2
"""Seconds between two looks for the resume point: at first, and at most."""


def job_spec(
    folder: Path | None, spec: str | Path | None, *, world_size: str, device_mesh: DeviceMesh | None = None
) -> JobSpec:
    """Return the job spec of the launch folder, or the named one with `world_size` ranks, and with the mesh of a script.

    Raise `SpecInvalid` without one, or if the launch has another mesh.
    """
    mesh = None if device_mesh is None else mesh_spec_of(device_mesh)
    if folder is not None:
        found = spec_of(folder)
        if mesh not in (None, found.launch.mesh):
            raise errors.SpecInvalid(
                f"expected the mesh of the launch, {found.launch.mesh!r}, found {mesh!r} in training_run(mesh=...): leave it "
                "out, or correct launch.mesh"
            )
        return found
    if spec is None:
        raise errors.SpecInvalid(
            'expected a launch by `dlac train`, or training_run("job.toml") under another launcher; found neither'
        )
    read = read_spec(Path(spec)).resolved(config.home_folder())
    if read.launch.healing:  # the ranks of this process group may be a part of all
        return read
    if mesh is not None and read.launch.mesh.recorded() and read.launch.mesh != mesh:
        raise errors.SpecInvalid(
            f"expected the mesh of the job spec, {read.launch.mesh!r}, found {mesh!r} in training_run(mesh=...): leave one out"
        )
    stated = {"world_size": world_size, **({} if mesh is None else {"mesh": mesh.model_dump()})}
    raw = {**read.model_dump(), "launch": {**read.launch.model_dump(), **stated}}
    return parse_spec(raw, origin=f"the job spec under WORLD_SIZE={world_size}")


def spec_of(folder: Path) -> JobSpec:
    """Return the job spec of a launch folder."""
    return parse_recorded(json.loads((folder / "spec.json").read_text()), origin="the launch folder's spec")


def open_plans(spec: JobSpec, *, supervised: bool) -> Plans:
    """Return the plans of the lakehouse. A supervised rank waits for the catalog, as its supervisor did. Raises as `connect`."""
    within_s = RETRY_WITHIN_S if supervised else 0.0
    return Plans(retrying(within_s, of=errors.CatalogUnreachable)(connect, spec.lakehouse, answered=supervised))


def await_resume_point(folder: Path) -> ResumePoint:
    """Wait for the supervisor's resume point and return it. No rank outlives its supervisor, so the wait has no limit."""
    path, pause_s = folder / "resume.json", _FIRST_LOOK_S
    while not path.exists():
        time.sleep(pause_s)
        pause_s = min(_LOOK_S, pause_s * 1.05)  # every rank polls, perhaps on a network file system
    return resume_point_of(json.loads(path.read_text()))


def claim_run(
    plans: Plans, spec: JobSpec, communicator: Communicator, *, takeover: bool, held: ExitStack
) -> ResumePoint:
    """Claim the run on rank 0, without a supervisor. The first rank of a node checks its checkpoint store.

    `held` keeps the run's lock, and rank 0's watch of the ledger: if an older backup replaces the catalog, it logs that, and the
    next commit fails. Raise a `DlacError`: on rank 0 the cause, on all further ranks that rank 0 failed.
    """

    def claim() -> str:
        for section in spec.sections.values():
            section.check_here()
        held.enter_context(run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=takeover))
        here, launched = communicator.is_on_one_node, communicator.is_launched
        point = claim_now(plans, spec, from_memory=here, has_folder=launched)
        held.callback(LedgerWatch(plans.lakehouse).close)
        return point.to_json()

    return resume_point_of(json.loads(decide_on_first(communicator, spec, claim)))


def decide_on_first(communicator: Communicator, spec: JobSpec, decide: Callable[[], str]) -> str:
    """Return rank 0's decision about the run, once its checkpoint store is checked. Collective. Raises as `claim_run`."""
    tree = communicator.tree
    with failing_together(tree, doing="looking at the checkpoint store"):
        if communicator.is_first_of_node:
            tiers_of(spec).check_writable()
    answer = None
    if tree.rank == 0:
        try:
            answer = decide()
        except Exception as err:  # an extension may raise any, and the other ranks wait
            message = str(err) if isinstance(err, errors.DlacError) else f"{type(err).__name__}: {err}"
            tree.broadcast(json.dumps({"error": message}).encode())
            raise
    received = tree.broadcast(None if answer is None else answer.encode()).decode()
    if "error" in json.loads(received):
        raise errors.TrainingFailed(f"rank 0 could not take over the run: {json.loads(received)['error']}")
    return received


def claim_now(plans: Plans, spec: JobSpec, *, from_memory: bool, has_folder: bool) -> ResumePoint:
    """Claim the run, whose lock this process has. `has_folder`: ranks have an own launch folder. Raises as `start_attempt`."""
    request = ClaimRequest(options=ResumeOptions(repin=True), from_memory=from_memory)
    if has_folder:
        request = replace(request, launch_folder=str(_own_folder(spec, request.nonce)))
    return start_attempt(plans, spec, request)


def make_own_folder(spec: JobSpec, nonce: str, *, forgets: bool) -> Path:
    """Make the launch folder of ranks that another launcher started, on their own node, for their heartbeats.

    `forgets`: remove the folders of old launches. Raises as `make_launch_folder`.
    """
    folder = _own_folder(spec, nonce)
    make_launch_folder(folder)
    if forgets:
        forget_launches(folder.parent, keep=KEEP_LAUNCHES)
    return folder


def move_to_own_folder(
    spec: JobSpec, nonce: str, communicator: Communicator, heartbeat: HeartbeatWriter, rank: int
) -> tuple[Path | None, HeartbeatWriter]:
    """Make the launch folder, and return it with the rank's heartbeat there. Collective. None: no launcher started the rank."""
    with failing_together(communicator.tree, doing="making the launch folder"):
        folder = None
        if communicator.is_launched:
            folder = make_own_folder(spec, nonce, forgets=communicator.is_first_of_node)
        return folder, heartbeat.moved_to(folder, rank)


def _own_folder(spec: JobSpec, nonce: str) -> Path:
    return Path(spec.checkpoint.local) / spec.run / f"launch-{nonce}"
