"""Streams of a rank's key groups: for each source the way from a key group and a cursor to its samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.documents import Documents, Samples
from dlac_pipeline.read.opening.open_source import OpenSource
from dlac_pipeline.read.packing import Packer, Sampler
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.reader import OpenStream
from dlac_pipeline.read.streams import BlockWalk, ItemStream, RowStream, SourceBlocks, Stream, size_of_columns
from dlac_pipeline.rows.tokenizing import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOpener:
    """Opener of the streams of one rank, whose blocks are decoded in `prefetch`."""

    leg: Leg
    order: LegOrder
    sources: tuple[OpenSource, ...]
    tokenizer: Tokenizer | None
    prefetch: Prefetcher

    def open_stream(self) -> OpenStream:
        """Return the function that opens the stream of a source and a key group."""
        openers = [self._opener(index) for index in range(len(self.sources))]
        return lambda source, group, cursor: openers[source](group, cursor)

    def _opener(self, index: int) -> Callable[[int, Cursor], Stream]:
        source, order, prefetch = self.sources[index], self.order.sources[index], self.prefetch
        if not self.leg.streamed[index]:
            columns = source.to_columns()
            blocks = SourceBlocks(index, order, source.decoder, prefetch, columns, size_of_columns, portions=True)
            return lambda group, cursor: RowStream(blocks.walk(group, cursor), cursor)
        if self.leg.sequences.length:
            return self._open_packed(
                SourceBlocks(
                    index,
                    order,
                    source.decoder,
                    prefetch,
                    source.to_documents(self.leg.sequences, self.tokenizer),
                    _nbytes,
                )
            )
        samples = SourceBlocks(index, order, source.decoder, prefetch, source.to_samples(), _nbytes)
        return _open_sampled(samples)

    def _open_packed(self, blocks: SourceBlocks[Documents]) -> Callable[[int, Cursor], Stream]:
        sequences, drain = self.leg.sequences, not self.leg.following

        def open_from(group: int, cursor: Cursor) -> Stream:
            walk = blocks.walk(group, cursor)
            line = _numbered(walk)
            packer = Packer(line, length=sequences.length, start=cursor, drain=drain, pad_id=sequences.pad_id)
            return ItemStream(walk, packer)

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
