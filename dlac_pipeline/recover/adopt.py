"""A run that begins from a checkpoint that others wrote: its first checkpoint, at step 0, whose history is unknown."""

from __future__ import annotations

import warnings
from dataclasses import asdict

from catalog.commits import Attempt
from catalog.connect import Lakehouse
from catalog.errors import SpecInvalid
from catalog.ledger import Ledger, checkpoint_rows
from dlac_pipeline.checkpoint.committing import Committer, Prepared
from dlac_pipeline.checkpoint.config import config_digest
from dlac_pipeline.checkpoint.failures import failure_named
from dlac_pipeline.checkpoint.foreign import Foreign
from dlac_pipeline.checkpoint.rows import Vote
from dlac_pipeline.checkpoint.sealing import Sealer
from dlac_pipeline.checkpoint.store import stage_name, storing, tiers_of
from dlac_pipeline.checkpoint.writing import Direct
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.read.open import open_leg
from dlac_pipeline.recover.coordinator import new_nonce, take_over
from dlac_pipeline.recover.leg_choice import Wish
from dlac_pipeline.recover.run_lock import run_lock
from dlac_pipeline.spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker


def adopt(lakehouse: Lakehouse, spec: JobSpec, foreign: Foreign) -> str:
    """Make the foreign checkpoint the first one of the spec's run, which is new; gives its id.

    Raises:
        SpecInvalid: the run has checkpoints of its own.
        StoreUnavailable: it cannot be written to the store; nothing was committed, and adopting it again goes on.
    """
    ledger, tiers = Ledger(lakehouse), tiers_of(spec)
    taken = checkpoint_rows(ledger.rows(spec.run, kinds=("checkpoint",)))
    if taken:
        raise SpecInvalid(
            f"expected a run without checkpoints to adopt one, found {len(taken)} of run {spec.run!r}: choose another name"
        )
    tiers.check_writable()
    with run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False):
        point = take_over(lakehouse, spec, nonce=new_nonce(), wish=Wish(), adopts=str(foreign.origin))
        leg = Leg.from_json(point.leg)
        opened = open_leg(lakehouse, leg, spec)
        committer = Committer(
            attempt=Attempt(run=spec.run, number=point.attempt, nonce=point.nonce),
            settings=spec.checkpoint,
            config_digest=config_digest(spec),
            order=opened.order,
            leg=leg,
            leg_is_new=True,
            parent=None,
            lakehouse=lakehouse,
            tiers=tiers,
        )
        name = stage_name(attempt=point.attempt, step=0, nonce=point.nonce)
        folder = tiers.folder(name)
        sealer = Sealer(folder, tiers.files, tiers.copy_of(name))
        try:
            with storing(folder), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                folder.mkdir(parents=True)
                foreign.copy(folder, Direct(sealer.save).write)
                files = [asdict(entry) for entry in sealer.finish()]
        finally:
            sealer.close()
        groups = range(opened.order.settings.key_groups)
        start = opened.start_state()
        cursors = [[list(start[source][group]) for source in range(len(start))] for group in groups]
        nothing: Vote = {
            "failure": None,
            "files": [],
            "phases": {},
            "step": 0,
            "groups": [],
            "cursors": [],
            "advances": [],
        }
        votes = [{**nothing, "files": files, "groups": list(groups), "cursors": cursors}]
        votes += [nothing] * (foreign.world_size - 1)
        prepared = Prepared(
            name=name,
            engine=foreign.engine,
            taken=ReaderStateTracker(committed_step=0, groups=groups),
            waited_s=0.0,
            note={"adopted": str(foreign.origin)},
        )
        decision = committer.decide(votes, prepared)
    if decision["error"] is not None:
        raise failure_named(decision["error"])
    checkpoint_id: str = decision["checkpoint_id"]
    return checkpoint_id
