"""What a call of a stream of items gives, laid out for tests."""

from dataclasses import dataclass

from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.line import BlockAdvance, Content
from dlac_pipeline.read.packing import ItemLine
from dlac_pipeline.rows.columns import Array


@dataclass(frozen=True)
class Taken:
    """Result of one call. `cursor` is where the line resumes."""

    count: int
    items: int
    cursor: Cursor
    advances: list[BlockAdvance]
    columns: dict[str, Array]


def take(line: ItemLine[Content], count: int, *, lay_out: bool = True) -> Taken:
    """Take up to `count` samples, or only pass over them."""
    given = line.take(count, 0, count if lay_out else 0)
    columns = {name: column.values for name, column in given.pieces[0][0].items()} if given.pieces else {}
    return Taken(given.count, given.items, line.cursor, given.advances, columns or line._columns([], 0))
