"""Retries of a recovery: it outlasts an outage of the catalog, and stops at once when it is asked to."""

from __future__ import annotations

import threading

import tenacity

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.spec.launch_request import OPERATOR

PATIENCE_S = 180.0
"""Seconds that a recovery waits for an unavailable catalog or store. Then it ends, and can be requested again."""
LOST_AFTER_S = 120.0
"""A launch on another machine counts as lost when it has given no sign of life for so long."""


def patience_s(*, replaces: int | None, noticed_by: str) -> float:
    """Return the seconds that a launch waits.

    A recovery waits: its attempt is known, or a program saw it fail. A person does not wait.
    """
    return PATIENCE_S if replaces is not None or noticed_by != OPERATOR else 0.0


def waiting_for(*away: type[DlacError], within_s: float, stop: threading.Event) -> tenacity.Retrying:
    """Repeat a call that raises one of these errors, at random growing intervals, until `stop` is set.

    Then raise the last one.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(away),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        stop=tenacity.stop_any(tenacity.stop_after_delay(within_s), tenacity.stop_when_event_set(stop)),
        sleep=tenacity.sleep_using_event(stop),
        reraise=True,
    )
