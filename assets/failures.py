"""How an error of DLAC becomes the failure of a Dagster step: with its reason, and with word for the recovery sensor."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from catalog import errors
from catalog.errors import DlacError

NO_RECOVERY_TAG = "dlac/no_recovery"
"""Set on a Dagster run whose failure another attempt would meet again; the sensor leaves it alone."""


@contextmanager
def told_to_dagster(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Turn a `DlacError` into `dagster.Failure`, and tag the run unless the error may pass."""
    try:
        yield
    except DlacError as err:
        raise failure(context, type(err).__name__, str(err)) from err


def failure(context: dg.AssetExecutionContext, kind: str, message: str) -> dg.Failure:
    """The failure of a step for an error named `kind`; a kind that DLAC does not know is something that died."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, DlacError) and not known.transient:
        context.instance.add_run_tags(context.run_id, {NO_RECOVERY_TAG: kind})
    return dg.Failure(f"{kind}: {message}", metadata={"error": kind}, allow_retries=False)
