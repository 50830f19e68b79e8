"""The stream of a late source takes no memory before its time, and is asked for one block ahead."""

from __future__ import annotations

from dlac_pipeline.extensions.replay.sample_rows import undecoded_streams
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.group import GroupReader, GroupSlots
from dlac_pipeline.read.packing import Stream
from tests.legs import leg_of, source_of, units_of


def test_late_stream_opens_with_last_block() -> None:
    """It opens when the last block of the first source is entered, and at once if that source was read before."""
    sources = source_of("a", key_groups=1), source_of("b", key_groups=1, place="late")
    order = leg_of(*sources, key_groups=1, batch_size=2).order({"a": units_of([4] * 6), "b": units_of([4] * 2)})
    open_one, opened = undecoded_streams(order), []

    def open_stream(source: int, group: int, cursor: Cursor) -> Stream:
        opened.append(source)
        return open_one(source, group, cursor)

    def reader(step: int) -> GroupReader:
        cursors = [of_source[0] for of_source in order.reader_state(step)]
        part = GroupSlots(group=0, slots=2, low=0, high=2)
        return GroupReader(
            order.mixture, (True, True), part, samples_before=2 * step, cursors=cursors, open_stream=open_stream
        )

    group = reader(0)
    seen = [(list(opened), group.take().source_of.tolist()) for _ in range(16)]
    assert [given for _, given in seen] == [[0, 0]] * 12 + [[1, 1]] * 4
    # a block has two slices of four rows: the ninth step enters the third and last one, and the next step sees that
    assert [len(before) for before, _ in seen] == [1] * 10 + [2] * 6
    opened.clear()
    assert reader(14).take().source_of.tolist() == [1, 1]
    assert opened == [0, 1]
