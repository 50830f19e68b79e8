"""Waiting for what is away: a recovery outlasts an outage of the catalog, and leaves at once when it is told to stop."""

from __future__ import annotations

import threading

import tenacity

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.spec.launch_request import OPERATOR

PATIENCE_S = 180.0
"""How long a recovery waits for a catalog or a store that is away; then it ends, and whoever requested it may ask again."""
LOST_AFTER_S = 120.0
"""A launch on another machine counts as lost when it has given no sign of life for so long."""


def patience_s(*, replaces: int | None, noticed_by: str) -> float:
    """How long a launch waits: a recovery has patience, of a known attempt or one that a program saw fail; a person has none."""
    return PATIENCE_S if replaces is not None or noticed_by != OPERATOR else 0.0


def waiting_for(*away: type[DlacError], within_s: float, stop: threading.Event) -> tenacity.Retrying:
    """Repeats what raises one of these errors, at random growing intervals, until `stop` is set; then raises the last one."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(away),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        stop=tenacity.stop_any(tenacity.stop_after_delay(within_s), tenacity.stop_when_event_set(stop)),
        sleep=tenacity.sleep_using_event(stop),
        reraise=True,
    )
