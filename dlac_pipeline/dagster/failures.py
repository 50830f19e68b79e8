"""Failures of Dagster steps from errors of DLAC, with the reason, and with tags for the recovery sensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from dlac_pipeline.lakehouse import errors

RUN_TAG = "dlac/run"
"""Tag with the training run of a Dagster run. The queue lets one Dagster run per training run train at a time."""
NO_RECOVERY_TAG = "dlac/no_recovery"
"""Tag of a Dagster run whose failure another attempt would meet again. The sensors leave it alone."""
PREEMPTED_TAG = "dlac/preempted"
"""Tag of a Dagster run that received a termination notice, whose value names it, and no person's cancel. It is resumed."""
OUTAGE_TAG = "dlac/outage"
"""Set on a Dagster run that ended because the catalog or the checkpoint store was unavailable: no fault of the training run."""
STEPPED_ASIDE_TAG = "dlac/stepped_aside"
"""Tag of a recovery that found another one at work. It has done nothing, and nothing is wrong."""

StepContext = dg.AssetExecutionContext | dg.AssetCheckExecutionContext
_AWAY = (errors.CatalogUnreachable, errors.CommitOutcomeUnknown, errors.StoreUnavailable)


@contextmanager
def as_failure(context: StepContext) -> Iterator[None]:
    """Turn a `DlacError` into `dagster.Failure`, and tag the run if trying again cannot help."""
    try:
        yield
    except errors.DlacError as err:
        raise failure(context, errors.error_kind(err), str(err)) from err


def failure(context: StepContext, kind: str, message: str) -> dg.Failure:
    """Return the failure of a step for an error named `kind`. A kind that DLAC does not know counts as a death."""
    known = errors.error_class(kind)
    if known is not None:
        if not known.transient:
            tag_run(context, NO_RECOVERY_TAG, kind)
        elif issubclass(known, _AWAY):
            tag_run(context, OUTAGE_TAG, kind)
    return dg.Failure(f"{kind}: {message}", metadata={"error": kind}, allow_retries=False)


def tag_run(context: StepContext, name: str, value: str) -> None:
    """Set a tag of this Dagster run."""
    context.instance.add_run_tags(context.run.run_id, {name: own_value(context.run, value)})


def own_value(run: dg.DagsterRun, value: str) -> str:
    """A value of a tag for which `run_tag` knows that it was set on this very run."""
    return f"{value}{_own_mark(run)}"


def run_tag(run: dg.DagsterRun, name: str) -> str:
    """Return a tag of this very run, or an empty string. A *re-executed* run has the tags of the one before."""
    value, mark = run.tags.get(name, ""), _own_mark(run)
    return value.removesuffix(mark) if value.endswith(mark) else ""


def _own_mark(run: dg.DagsterRun) -> str:
    return f" ({run.run_id[:8]})" if run.parent_run_id else ""
