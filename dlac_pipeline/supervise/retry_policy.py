"""Times for which a launch retries an unavailable catalog, and waits for a silent launch."""

from dlac_pipeline.spec.launch_request import OPERATOR

RETRY_WITHIN_S = 180.0
"""Seconds for which a recovery retries an unavailable catalog or store. Then it ends, and can be requested again."""
LOST_AFTER_S = 120.0
"""Seconds of silence after which a launch on another node counts as lost."""


def retry_within_s(*, replaces: int | None, noticed_by: str) -> float:
    """Return the seconds for which a launch retries an unavailable catalog or store: 0 if a person starts it."""
    return RETRY_WITHIN_S if replaces is not None or noticed_by != OPERATOR else 0.0
