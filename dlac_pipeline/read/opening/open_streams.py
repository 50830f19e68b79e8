"""Streams of a rank's key groups: for each source the way from a key group and a cursor to its samples."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.documents import Documents, Samples
from dlac_pipeline.read.group import OpenStream
from dlac_pipeline.read.line import Content
from dlac_pipeline.read.packing import ItemLine, Packer, Sampler
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.streams import ItemStream, RowStream, SourceBlocks, Stream, size_of_columns

if TYPE_CHECKING:
    from dlac_pipeline.read.opening.open_leg import OpenLeg


def open_streams(opened: "OpenLeg", prefetch: Prefetcher) -> OpenStream:
    """Return the function that opens the stream of a source and a key group, whose blocks are decoded in `prefetch`."""
    openers = [_opener(opened, prefetch, index) for index in range(len(opened.sources))]
    return lambda source, group, cursor: openers[source](group, cursor)


def _opener(opened: "OpenLeg", prefetch: Prefetcher, index: int) -> Callable[[int, Cursor], Stream]:
    source, order, leg = opened.sources[index], opened.order.sources[index], opened.leg
    if not leg.streamed[index]:
        columns = source.to_columns()
        blocks = SourceBlocks(index, order, source.decoder, prefetch, columns, size_of_columns, portions=True)
        return lambda group, cursor: RowStream(blocks.walk(group, cursor), cursor)
    if leg.sequences.length:
        documents, sequences = source.to_documents(leg.sequences, opened.tokenizer), leg.sequences
        packer = partial(Packer, length=sequences.length, drain=not leg.following, pad_id=sequences.pad_id)
        return _open_items(SourceBlocks(index, order, source.decoder, prefetch, documents, _nbytes), packer)
    return _open_items(SourceBlocks(index, order, source.decoder, prefetch, source.to_samples(), _nbytes), Sampler)


def _open_items(
    blocks: SourceBlocks[Content], line: Callable[..., ItemLine[Content]]
) -> Callable[[int, Cursor], Stream]:
    def open_from(group: int, cursor: Cursor) -> Stream:
        walk = blocks.walk(group, cursor)
        numbered = ((stretch.pass_index, stretch.block.index, content) for stretch, content in walk)
        return ItemStream(walk, line(numbered, start=cursor))

    return open_from


def _nbytes(prepared: Documents | Samples) -> int:
    return prepared.nbytes
