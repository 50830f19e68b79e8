"""Report of a run under chaos: the faults, and the audit of the consumed rows."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dlac_pipeline.audit.audit import AuditReport, audit_run
from dlac_pipeline.audit.wording import format_count
from dlac_pipeline.extensions.chaos.campaign import ChaosCampaign, ChaosPlan
from dlac_pipeline.extensions.chaos.chaos_job import ChaosJob
from dlac_pipeline.extensions.chaos.facts import Fault, add_facts
from dlac_pipeline.extensions.chaos.supervised_nodes import SupervisedNodes
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.spec.job_spec import JobSpec

_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosReport:
    """The faults of a run and its audit."""

    run: str
    faults: Sequence[Fault]
    audit: AuditReport | None
    """None: the run has consumed nothing, or the lakehouse does not answer."""
    failure: DlacError | None
    """The first error, of the run, the faults or the audit, or None if all faults were healed."""
    seconds: float

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        healed = sum(fault.recovery_s is not None for fault in self.faults)
        exact = (
            "unknown"
            if self.audit is None
            else "exact: no row was repeated or lost"
            if self.audit.exact
            else "NOT exact"
        )
        return f"{healed} of {format_count(len(self.faults), 'fault')} healed; the audit of run {self.run} is {exact}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "format_version": _FORMAT_VERSION,
            "run": self.run,
            "healed": self.failure is None,
            "failure": None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}",
            "seconds": round(self.seconds, 1),
            "faults": [fault.to_json() for fault in self.faults],
            "audit": None if self.audit is None else self.audit.to_json(),
        }


def inject_faults(spec: JobSpec, lakehouse: Lakehouse, plan: ChaosPlan, *, say: Callable[[str], None]) -> ChaosReport:
    """Train a run of `chaos_spec` under the faults of a plan, and audit it. No process of it is left.

    `say` shows a line. Raises `SpecInvalid` if the run exists, or a kind of fault cannot be done with the job.
    """
    ledger = Ledger(lakehouse)
    if ledger.state(spec.run).exists:
        raise SpecInvalid(
            f"expected a new run, found run {spec.run!r} in the ledger: choose another name with --run, such as "
            f"--run {spec.run}-{time.strftime('%m%d-%H%M')}"
        )
    failure: DlacError | None = None
    audit, began = None, time.monotonic()
    with (
        TemporaryDirectory(prefix="dlac-chaos-") as folder,
        closing(ChaosJob(spec, plan.kinds)) as job,
        closing(SupervisedNodes(job, Path(folder))) as nodes,
    ):
        campaign = ChaosCampaign(job, nodes, ledger, plan, say=say)
        try:
            campaign.run()
        except DlacError as err:
            failure = err
    try:
        add_facts(lakehouse, campaign.faults)
        audit = audit_run(lakehouse, spec.run)
    except DlacError as err:
        failure = failure or err
    seconds = time.monotonic() - began
    return ChaosReport(run=spec.run, faults=campaign.faults, audit=audit, failure=failure, seconds=seconds)
