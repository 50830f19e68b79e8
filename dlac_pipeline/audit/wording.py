"""Text for people, plain and without markup: durations, ages, counts, bytes and rates."""

from datetime import UTC, datetime

from rich.filesize import decimal

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def format_duration(seconds: float) -> str:
    """Write a duration with its two largest units: 0.4 s, 9 s, 45 s, 10 min, 3 min 51 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 0.0995:
        return f"{seconds:.2f} s" if seconds >= 0.005 else "0 s"
    if seconds < 9.95:
        return f"{f'{seconds:.1f}'.removesuffix('.0')} s"
    whole = round(seconds)
    index = next(at for at, (length, _) in enumerate(_UNITS) if whole >= length)
    length, unit = _UNITS[index]
    count, rest = divmod(whole, length)
    if not rest or index + 1 == len(_UNITS):
        return f"{count} {unit}"
    smaller, smaller_unit = _UNITS[index + 1]
    small = rest // smaller
    return f"{count} {unit} {small} {smaller_unit}" if small else f"{count} {unit}"


def format_age(moment: datetime | float | None, *, now: float | None = None) -> str:
    """Return the age of a moment, or an empty string without one. A clock that is ahead makes it a moment to come."""
    if moment is None:
        return ""
    at = moment.timestamp() if isinstance(moment, datetime) else moment
    return format_ago((datetime.now(UTC).timestamp() if now is None else now) - at)


def format_ago(seconds: float) -> str:
    """Write a number of seconds as an age: 10 min ago."""
    if seconds <= -5:
        return f"in {format_duration(round(-seconds))}"
    if seconds < 1:
        return "now"
    return f"{int(seconds)} s ago" if seconds < 60 else f"{format_duration(seconds - seconds % 60)} ago"


def format_count(count: int, noun: str) -> str:
    """Write a count with its noun: 1 attempt, 5 attempts, 1,234 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: int | None) -> str:
    """Return a number of bytes as text, such as 17.5 kB, or an empty string if it is unknown."""
    return "" if count is None else decimal(count)
