"""`dlac check-loader` on real loaders: in processes that are killed, with the example file and changes of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.loader_check import check
from tests.conftest import wait_until
from tests.forked import Forked

ROOT = Path(__file__).parents[3]
DLAC = Path(sys.executable).parent / "dlac"
EXAMPLE = Path(check.__file__).with_name("example.py.template").read_text()
IDS = 'return batch["row_id"].to_numpy()'
OURS = "from benchmarks.peer_loaders.dlac import SHARED_STATE, open_loader\n"
HANGS = """
import os
import time


def open_loader(job, state):
    with open("PIDS", "a") as stream:
        stream.write(f"{os.getpid()} ")
    time.sleep(600)
"""
PERMUTED = """
import json

import numpy as np
import pyarrow.parquet as pq

NOT_OFFERED = {}


class Loader:
    def __init__(self, job, state):
        self.job, self.resumed = job, state is not None
        self.at = json.loads(state)["at"] if state else 0
        self.row_id = np.concatenate([pq.read_table(each, columns=["row_id"])["row_id"].to_numpy() for each in job.files])

    def batches(self, pass_number):
        job, order = self.job, np.arange(len(self.row_id))
        epoch = pass_number
        if job.shuffle:
            order = np.random.default_rng(job.seed + epoch).permutation(order)
        mine = order[job.rank :: job.world_size]
        while self.at < len(mine):
            rows = mine[self.at : self.at + job.rank_batch]
            self.at += len(rows)
            yield self.row_id[rows]
        self.at, self.resumed = 0, False

    def ids(self, batch):
        return batch

    def state(self):
        return json.dumps({"at": self.at}).encode()

    def close(self):
        pass


def open_loader(job, state):
    return Loader(job, state)
"""


class Folder:
    """A folder with a loader, and the temporary files of the command."""

    def __init__(self, path: Path) -> None:
        self.loader = path / "my_loader.py"
        self.temporary = path / "temporary"
        self.temporary.mkdir()

    def start(self, text: str, *options: str) -> Forked:
        """Start the command on a loader with this text."""
        self.loader.write_text(text)
        command = [str(DLAC), "check-loader", str(self.loader), "--workers", "0", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        return Forked(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self, text: str, only: str, *options: str) -> tuple[int, dict[str, Any], str]:
        """Return the exit status, the verdicts by scenario, and the errors. Nothing is left on the disk."""
        with self.start(text, "--json", "--only", only, *options) as process:
            answer, errors = process.communicate()
        assert list(self.temporary.iterdir()) == []
        assert {path.name for path in self.loader.parent.iterdir()} == {self.loader.name, self.temporary.name}
        return process.returncode, {each["scenario"]: each for each in json.loads(answer or "[]")}, errors


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder of this test."""
    return Folder(tmp_path)


def changed(before: str, after: str) -> str:
    """Return the example with a change."""
    assert EXAMPLE.count(before) == 1
    return EXAMPLE.replace(before, after)


def test_example_is_judged(folder: Folder) -> None:
    """The example resumes after SIGKILL exactly, loses rows with more ranks, and skips what it does not offer."""
    status, verdicts, errors = folder.check(EXAMPLE, "tail,kill,resize_2_4,shuffle")
    assert status == 1, errors
    exact = {name: each["exact"] for name, each in verdicts.items()}
    assert exact == {"tail": True, "kill": True, "resize_2_4": False, "shuffle": None}
    assert (verdicts["resize_2_4"]["repeated"], verdicts["resize_2_4"]["missing"]) == (0, 832)
    assert verdicts["shuffle"]["remark"] == "reads in the order of the files"


@pytest.mark.slow
def test_exact_loader_passes(folder: Folder) -> None:
    """DLAC's own dataset is exact: killed, and over a table to which rows are appended."""
    status, verdicts, errors = folder.check(OURS, "kill,append")
    assert status == 0, errors
    assert all((each["repeated"], each["missing"]) == (0, 0) for each in verdicts.values())


def test_rows_repeated_after_kill(folder: Folder) -> None:
    """A state that rounds its position down repeats the rest of a row group on both ranks. Uninterrupted it is exact."""
    text = changed("return json.dumps(self.at).encode()", 'return json.dumps({**self.at, "row": 0}).encode()')
    status, verdicts, _ = folder.check(text, "kill", "--python", os.path.relpath(sys.executable))
    assert (status, verdicts["kill"]["missing"], verdicts["kill"]["remark"]) == (1, 0, "")
    assert verdicts["kill"]["repeated"] == 2 * 16


ALL_EXACT = dict.fromkeys(("second_pass", "second_pass_shuffled", "pass_boundary", "between_passes"), True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", ALL_EXACT),
        (
            "epoch = pass_number",
            "epoch = 0 if self.resumed else pass_number",
            {**ALL_EXACT, "second_pass_shuffled": False, "between_passes": False},
        ),
        ("self.at, self.resumed = 0, False", "self.resumed = False", {"between_passes": False}),
    ],
    ids=["order of the pass", "lost seed", "end skips a pass"],
)
def test_passes_are_judged(folder: Folder, before: str, after: str, expected: dict[str, bool]) -> None:
    """An order by passes is exact if resumed in it. A resumed pass in the first one's order repeats rows, or skips a pass."""
    assert not before or PERMUTED.count(before) == 1
    status, verdicts, errors = folder.check(PERMUTED.replace(before, after), ",".join(expected))
    exact = {name: each["exact"] for name, each in verdicts.items()}
    assert (status, exact) == (int(False in expected.values()), expected), errors
    if "resumed else" in after:
        assert verdicts["second_pass_shuffled"]["repeated"] == verdicts["second_pass_shuffled"]["missing"] > 0
        assert verdicts["between_passes"]["remark"].startswith("the resumed pass has the order of the first one")
    elif False in expected.values():
        assert [each["repeated"] + each["missing"] for each in verdicts.values()] == [2048]


@pytest.mark.slow
def test_rows_outside_filter_count(folder: Folder) -> None:
    """A loader that ignores the filter is not exact, although it repeats and misses nothing."""
    status, verdicts, _ = folder.check(changed('    "filter": "reads all rows",\n', ""), "filter")
    assert (status, verdicts["filter"]["repeated"], verdicts["filter"]["missing"]) == (1, 0, 0)
    assert verdicts["filter"]["remark"] == "read 1,024 rows that the filter leaves out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (IDS, 'return batch["id"].to_numpy()', "my_loader.py:40: KeyError: "),
        ("def close", "def end", "expected open_loader() to return a loader with the methods batches, ids, state, close"),
        ("[rank::ranks]", "[rank::ranks][:3]", "expected batches() to yield 26 batches of 16 rows to this rank, found only 6"),
        ('while self.at["group"] < len(groups):', "while groups.append(groups[0]) is None:", "found no end after"),
    ],
)  # fmt: skip
def test_misuse_names_line(folder: Folder, before: str, after: str, expected: str) -> None:
    """A loader that raises, has no ids, ends early or never ends is refused with the place in its file."""
    status, verdicts, _ = folder.check(changed(before, after), "kill")
    assert status == 1
    assert verdicts["kill"]["remark"].startswith("failed: ")
    assert expected in verdicts["kill"]["remark"]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("x = 1\n", (), "expected my_loader.py to define open_loader(job, state)"),
        ("def open_loader(:\n", (), "my_loader.py:1: SyntaxError"),
        (EXAMPLE.replace('"filter":', '"filters":'), (), "in NOT_OFFERED of my_loader.py, found filters"),
        (EXAMPLE, ("--only", "kill,tial"), "found tial: correct --only"),
    ],
)
def test_bad_input_is_refused(folder: Folder, text: str, options: tuple[str, ...], expected: str) -> None:
    """A file without a loader, and wrong options, have exit status 64 and one line."""
    status, _, errors = folder.check(text, "kill", *options)
    assert (status, expected in errors) == (64, True), errors


@pytest.mark.slow
def test_stopped_command_leaves_nothing(folder: Folder) -> None:
    """SIGTERM ends the ranks of a loader that hangs, and removes the files."""
    pids = folder.loader.parent / "pids"
    with folder.start(HANGS.replace("PIDS", str(pids)), "--only", "tail") as process:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 4, what="processes of the loader")
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(folder.temporary.iterdir()) == []
    ranks = [Path(f"/proc/{pid}") for pid in pids.read_text().split()]
    wait_until(lambda: not any(rank.exists() for rank in ranks), what="the end of the ranks")
