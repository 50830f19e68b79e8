"""The one policy by which commits are repeated: until they are decided, or the catalog stayed away for too long."""

from __future__ import annotations

import tenacity

from catalog.errors import CatalogUnreachable, CommitConflict


def retrying(deadline_s: float = 60.0) -> tenacity.Retrying:
    """Repeats what lost a race, or got no answer, at random growing intervals; raises the last error past the deadline."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((CommitConflict, CatalogUnreachable)),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=min(5.0, deadline_s / 12)),
        stop=tenacity.stop_after_delay(deadline_s),
        reraise=True,
    )
