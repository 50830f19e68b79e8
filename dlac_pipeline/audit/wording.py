"""Text for people, plain and without markup: durations, ages, counts, bytes, and tables that fit the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest

from rich.cells import cell_len, chop_cells
from rich.filesize import decimal

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_GAP = "  "
_ROOMY = 36
"""Columns that a long column must have to be folded in its place."""
_NARROW = 24
"""Columns that a value keeps beside its label, however narrow the terminal is."""


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


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun: 1 attempt, 5 attempts, 1,234 rows."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(count: int | None) -> str:
    """Return a number of bytes as text, such as 17.5 kB, or an empty string if it is unknown."""
    return "" if count is None else decimal(count)


def format_rate(per_s: float, noun: str) -> str:
    """Write a rate: 12 samples/s, 0.42 steps/s."""
    return f"{per_s:,.0f} {noun}/s" if per_s >= 10 else f"{per_s:.2g} {noun}/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumn:
    """One column of a table for people."""

    name: str
    right: bool = False
    """True if its values are aligned on the right, as numbers are."""
    long: bool = False
    """True if its values get lines of their own where the table is wider than the terminal."""


def table_columns(names: Sequence[str], *, right: Sequence[str] = (), long: Sequence[str] = ()) -> list[TableColumn]:
    """Return columns by their names. `right` and `long` name those with these properties."""
    return [TableColumn(name=name, right=name in right, long=name in long) for name in names]


def lay_out_table(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lay a table out in `width` columns. Columns without any value are left out.

    If it is wider, a long column is folded if much room is left for it. Otherwise long values get lines of their own. A table
    that is still wider becomes a block for each row.
    """
    cells = [[" ".join(value.split("\n")) for value in row] for row in rows]
    used = [index for index in range(len(columns)) if any(row[index] for row in cells)]
    long = [index for index in used if columns[index].long]
    for inline in (used, [index for index in used if index not in long]):
        found = _lines_of(columns, cells, inline, [index for index in used if index not in inline], width)
        if found is not None:
            return found
    blocks = [lay_out_facts({columns[index].name: row[index] for index in used}, width) for row in rows]
    return [line for block in blocks for line in ([*block, ""])][:-1]


def _lines_of(
    columns: Sequence[TableColumn],
    rows: Sequence[Sequence[str]],
    inline: Sequence[int],
    below: Sequence[int],
    width: int,
) -> list[str] | None:
    """Return the table with the columns `inline`, and the others `below` each row, or None if that is wider than `width`."""
    if not inline:
        return None
    cells_of = {index: [columns[index].name, *(row[index] for row in rows)] for index in inline}
    widths = {index: max(map(cell_len, cells)) for index, cells in cells_of.items()}
    excess = sum(widths.values()) + len(_GAP) * (len(inline) - 1) - width
    long = [index for index in inline if columns[index].long]
    if excess > 0:
        if len(long) != 1 or widths[long[0]] - excess < _ROOMY:
            return None
        widths[long[0]] -= excess
    shown = [columns[index] for index in inline]
    lines = [_line([each.name for each in shown], shown, widths.values())]
    for row in rows:
        parts = [fold(row[index], widths[index]) if excess > 0 and index in long else [row[index]] for index in inline]
        lines += [_line(cells, shown, widths.values()) for cells in zip_longest(*parts, fillvalue="")]
        facts = {columns[index].name: row[index] for index in below}
        lines += [_GAP + line for line in lay_out_facts(facts, width - len(_GAP))]
    return lines


def _line(cells: Sequence[str], columns: Sequence[TableColumn], widths: Iterable[int]) -> str:
    padded = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if column.right else cell + space)
    return _GAP.join(padded).rstrip()


def lay_out_facts(facts: Mapping[str, object], width: int) -> list[str]:
    """Lay facts out as a label and a value on each line. Long values are folded. Unknown and empty ones are left out."""
    shown = {name: str(value) for name, value in facts.items() if value is not None and str(value)}
    label = max((cell_len(name) for name in shown), default=0)
    label = min(label, max(width - _NARROW, width // 3))
    lines = []
    for name, value in shown.items():
        parts = [part for line in value.split("\n") for part in fold(line, width - label - len(_GAP))]
        names = fold(name, label) if label else [name]
        for left, right in zip_longest(names, parts, fillvalue=""):
            lines.append(f"{left}{' ' * (label - cell_len(left))}{_GAP}{right}".rstrip())
    return lines


def fold(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` columns, at blanks where there are some."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        lines += [line] if line else []
        *full, line = chop_cells(word, max(1, width)) or [""]
        lines += full
    return [*lines, line]
