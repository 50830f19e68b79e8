"""Retries of a recovery: they outlast an outage of the catalog, and end at once when a stop is requested."""

from __future__ import annotations

import threading

import tenacity

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.spec.launch_request import OPERATOR

RETRY_WITHIN_S = 180.0
"""Seconds for which a recovery retries an unavailable catalog or store. Then it ends, and can be requested again."""
LOST_AFTER_S = 120.0
"""Seconds of silence after which a launch on another node counts as lost."""


def retry_within_s(*, replaces: int | None, noticed_by: str) -> float:
    """Return the seconds for which a launch retries calls to the catalog and the store.

    A recovery retries: its attempt is known, or a program saw it fail. A launch by a person does not retry.
    """
    return RETRY_WITHIN_S if replaces is not None or noticed_by != OPERATOR else 0.0


def retrying(*outages: type[DlacError], within_s: float, stop: threading.Event) -> tenacity.Retrying:
    """Return retries of a call that raises one of these errors, for `within_s` at random growing intervals, or until `stop`.

    The last error is raised.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(outages),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        stop=tenacity.stop_any(tenacity.stop_after_delay(within_s), tenacity.stop_when_event_set(stop)),
        sleep=tenacity.sleep_using_event(stop),
        reraise=True,
    )
