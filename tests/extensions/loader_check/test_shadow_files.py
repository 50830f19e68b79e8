"""Files of `dlac.Shadow`: recorded calls, calls that never reach the loop, and the steps in the model."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlac_pipeline.extensions.loader_check import Shadow
from dlac_pipeline.extensions.loader_check.shadow.launches import Launch, read_launches
from dlac_pipeline.lakehouse.errors import FormatTooNew, SpecInvalid

pytestmark = pytest.mark.usefixtures("only_this_process")


def record(folder: Path, *, step: int, steps: int, ranks: int = 1, ends: bool = False) -> None:
    """Record a launch. The rows of a step are 10 * step + rank."""
    for rank in range(ranks):
        shadow = Shadow(folder, step=step, rank=rank, world_size=ranks)
        for number in range(step + 1, step + steps + 1):
            shadow.step([10 * number + rank])
        if ends:
            shadow.close()


def rows(launch: Launch) -> list[int]:
    """Return the rows that are in the model."""
    return [int(row) for each in launch.surviving() for row in each.ids]


@pytest.mark.parametrize("ids", [[1, 2], np.array([[1], [2]], np.uint8), torch.tensor([1, 2], requires_grad=False)])
def test_ids_of_any_kind_are_recorded(tmp_path: Path, ids: Any) -> None:
    """Lists, arrays and tensors of any shape are rows."""
    with Shadow(tmp_path / "new" / "folder", step=7) as shadow:
        shadow.step(ids, pass_number=3)
    [launch] = read_launches(tmp_path / "new" / "folder")
    [step] = launch.ranks[0]
    assert (launch.step, launch.has_ended, step.pass_number, step.step, step.ids.tolist()) == (7, True, 3, 8, [1, 2])


def test_later_launch_takes_steps_back(tmp_path: Path) -> None:
    """A launch that resumes at an earlier step takes back the later ones of all launches before it."""
    record(tmp_path, step=0, steps=5, ranks=2)
    record(tmp_path, step=4, steps=3)
    record(tmp_path, step=2, steps=2, ranks=2, ends=True)
    launches = read_launches(tmp_path)
    assert [(each.number, each.step, each.world_size, each.kept) for each in launches] == [
        (1, 0, 2, 2),
        (2, 4, 1, 4),
        (3, 2, 2, None),
    ]
    assert [rows(each) for each in launches] == [[10, 20, 11, 21], [], [30, 40, 31, 41]]
    assert [each.has_ended for each in launches] == [False, False, True]
    assert [gap for each in launches for gap in each.gaps()] == []


@pytest.mark.parametrize(
    ("launches", "kept", "doubtful"),
    [
        (((0, 9), (0, 2), (5, 1)), [5, 0, None], False),
        (((0, 9), (5, 4), (8, 1)), [5, 8, None], True),
        (((0, 4), (0, 1), (7, 1)), [7, 0, None], False),
    ],
    ids=["restarted in vain", "several have it", "none has it"],
)
def test_launches_off_lineage_keep_nothing(
    tmp_path: Path, launches: tuple[tuple[int, int], ...], kept: list[int | None], doubtful: bool
) -> None:
    """A launch unknown to the last launch takes back no step of others, and has none in the model."""
    for step, steps in launches:
        record(tmp_path, step=step, steps=steps)
    found = read_launches(tmp_path)
    assert [each.kept for each in found] == kept
    assert bool(found[2].doubts) == doubtful
    assert (kept[0] == 7) == (found[0].gaps() == ["launch 1 has steps up to 4 of rank 0, and trained up to 7"])


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, 0), (1, 1), (2, 2), (3, 90), (0, 91), (2, 91), (1, 92)], [{0, 1, 2}, {0, 1, 2, 3}]),
        ([(0, 0), (1, 1), (2, 2), (3, 3), (2, 90), (0, 91)], [{0, 1, 2, 3}, {0, 2}]),
    ],
    ids=["first without rank 3", "second without ranks"],
)
def test_rank_joins_its_own_launch(
    tmp_path: Path, starts: list[tuple[int, int]], expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch without a file of a rank does not get the file of the next launch, which began at the same step."""
    for rank, time_s in starts:
        monkeypatch.setattr(
            "dlac_pipeline.extensions.loader_check.row_log.time.time_ns", lambda now=time_s: now * 10**9
        )
        Shadow(tmp_path, step=0, rank=rank, world_size=4).step([rank])
    assert [set(each.ranks) for each in read_launches(tmp_path)] == expected


@pytest.mark.parametrize("tail", [bytes(2400), np.array([0, 4, -3], np.int64).tobytes()], ids=["zeros", "count"])
def test_damaged_tail_is_no_record(tmp_path: Path, tail: bytes) -> None:
    """Zeros after a crash of the node, and a record of fewer than no rows, end the log."""
    record(tmp_path, step=0, steps=3)
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + tail)
    [launch] = read_launches(tmp_path)
    assert (rows(launch), launch.last_step) == ([10, 20, 30], 3)


def test_lost_rank_is_named(tmp_path: Path) -> None:
    """A rank without a file, and one that recorded fewer steps than the model has, are gaps. A torn record does not count."""
    record(tmp_path, step=0, steps=3, ranks=3)
    record(tmp_path, step=3, steps=1)
    first, *_ = sorted(tmp_path.glob("rank-00000-*"))
    first.unlink()
    [second] = tmp_path.glob("rank-00001-*")
    second.write_bytes(second.read_bytes()[:-3])
    assert read_launches(tmp_path)[0].gaps() == [
        "launch 1 has no file of rank 0",
        "launch 1 has steps up to 2 of rank 1, and trained up to 3",
    ]


@pytest.mark.parametrize("ids", [["a"], None, np.array([2**63], np.uint64)])
def test_bad_ids_do_not_raise(tmp_path: Path, ids: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The first bad step is one warning, and the rank records nothing more."""
    shadow = Shadow(tmp_path, step=0)
    with caplog.at_level(logging.WARNING):
        for given in ([1], ids, [2], ids):
            shadow.step(given)
        shadow.close()
    [launch] = read_launches(tmp_path)
    assert rows(launch) == [1]
    assert len(caplog.messages) == 1
    assert "training is not affected" in caplog.text


def test_bad_start_does_not_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a rank nothing is recorded, and nothing is raised."""
    monkeypatch.setenv("RANK", "first")
    shadow = Shadow(tmp_path / "folder", step=0)
    shadow.step([1])
    shadow.close()
    shadow.step([1])
    assert len(caplog.messages) == 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    """An empty folder, a file of another program, and one of a later version."""
    with pytest.raises(SpecInvalid, match="found none"):
        read_launches(tmp_path)
    file = tmp_path / "rank-00000-1-1.rows"
    file.write_text("hello\n")
    with pytest.raises(SpecInvalid, match="found another content"):
        read_launches(tmp_path)
    file.write_text(json.dumps({"format_version": 2, "rank": 0, "world_size": 1, "step": 0, "started_ns": 1}) + "\n")
    with pytest.raises(FormatTooNew, match="found 2"):
        read_launches(tmp_path)
