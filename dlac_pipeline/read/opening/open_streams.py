"""Streams of a rank's key groups: for each source the way from a key group and a cursor to its samples."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.documents import Documents, Samples
from dlac_pipeline.read.group import OpenStream
from dlac_pipeline.read.packing import Packer, Sampler
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.streams import BlockWalk, ItemStream, RowStream, SourceBlocks, Stream, size_of_columns

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
        documents = source.to_documents(leg.sequences, opened.tokenizer)
        return _open_packed(SourceBlocks(index, order, source.decoder, prefetch, documents, _nbytes), leg)
    return _open_sampled(SourceBlocks(index, order, source.decoder, prefetch, source.to_samples(), _nbytes))


def _open_packed(blocks: SourceBlocks[Documents], leg: Leg) -> Callable[[int, Cursor], Stream]:
    length, pad_id, drain = leg.sequences.length, leg.sequences.pad_id, not leg.following

    def open_from(group: int, cursor: Cursor) -> Stream:
        walk = blocks.walk(group, cursor)
        return ItemStream(walk, Packer(_numbered(walk), length=length, start=cursor, drain=drain, pad_id=pad_id))

    return open_from


def _open_sampled(blocks: SourceBlocks[Samples]) -> Callable[[int, Cursor], Stream]:
    def open_from(group: int, cursor: Cursor) -> Stream:
        walk = blocks.walk(group, cursor)
        return ItemStream(walk, Sampler(_numbered(walk), start=cursor))

    return open_from


def _nbytes(prepared: Documents | Samples) -> int:
    return prepared.nbytes


def _numbered(walk: BlockWalk[Any]) -> Any:
    return ((stretch.pass_index, stretch.block.index, content) for stretch, content in walk)
