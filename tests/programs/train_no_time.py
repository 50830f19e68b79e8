"""train_tiny, whose rank 0 expects of every checkpoint that it takes an hour."""

import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

from dlac_pipeline.checkpoint.interval import Interval


def an_hour(interval: Interval, now: float, *, behind: bool) -> float:
    """In the place of what the last one took."""
    return 3600.0


if __name__ == "__main__":
    Interval.needed_s = an_hour  # type: ignore[assignment, method-assign]  # replaced where it is used
    train_tiny.main()
