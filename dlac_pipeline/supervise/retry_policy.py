"""Times for which a launch retries an unavailable catalog, and waits for a silent launch."""

RETRY_WITHIN_S = 180.0
"""Seconds for which a recovery retries an unavailable catalog or store. Then it ends, and can be requested again."""
LOST_AFTER_S = 120.0
"""Seconds of silence after which a launch on another node counts as lost."""
