"""End of a run: its finish in the ledger, the release of pins, and the event that names the ending."""

import logging

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.pins import release_pins
from dlac_pipeline.lakehouse.ledger.commits import finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.train.open_attempt import OpenAttempt

_log = logging.getLogger(__name__)


def end_run(lakehouse: Lakehouse, attempt: OpenAttempt, tree: RankTree, *, stopped: bool) -> str:
    """Finish the run if its last leg is trained, and return the ending: finished, stopped or caught up. Collective."""
    finished = not stopped and attempt.ends_run
    if finished and tree.rank == 0:
        finish(Ledger(lakehouse), attempt.name, step=attempt.step)
    tree.broadcast(b"done" if tree.rank == 0 else None)
    return "finished" if finished else "stopped" if stopped else "caught_up"


def release_old_pins(lakehouse: Lakehouse, spec: JobSpec) -> None:
    """Release the pins of earlier legs. A failure is left to the next launch, because all rows were committed."""
    for source in spec.sources:
        try:
            release_pins(lakehouse, spec.run, source.table)
        except (DlacError, OSError) as err:
            _log.warning("expected to release pins that no run needs, found %s; the next launch tries again", err)
