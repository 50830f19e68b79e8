"""The only replaced part of a real supervisor: a starter that starts `stub_rank.py` instead of the script.

The rest of a launch is the product's: its folder, the process group of each rank, the signals.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks.launch_folder import pid_file, progress_file
from dlac_pipeline.elastic.ranks.processes import Processes, RankProcesses
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, read_record
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter

_STUB = Path(__file__).with_name("stub_rank.py")


class StubStarter(RankStarter):
    """Starts each rank as a bare Python without imports. It has no fork server."""

    def __init__(self, record: bytes) -> None:
        """`record` is the progress that each rank writes once it has the resume point."""
        super().__init__()
        self._record = record.hex()

    def begin(self, spec: JobSpec) -> None:
        """Preload nothing."""

    def start(self, spec: JobSpec, folder: Path, share: Share) -> RankGroup:
        """Start stubs."""
        ranks = range(share.first_rank, share.first_rank + share.ranks)
        start = partial(self._start_stubs, ranks, folder)
        processes = RankProcesses(ranks, start, abort=lambda: None, why_unknown=lambda: None, patience_s=60.0)
        return RankGroup(folder, processes)

    def _start_stubs(self, ranks: range, folder: Path) -> Processes:
        stubs: dict[int, Any] = {rank: _Stub(folder, rank, self._record) for rank in ranks}
        return stubs


class _Stub:
    """The process of one stub."""

    def __init__(self, folder: Path, rank: int, record: str) -> None:
        files = [folder / "resume.json", pid_file(folder, rank), progress_file(folder, rank)]
        command = [sys.executable, "-I", "-S", str(_STUB), *map(str, files), record]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """Its exit status."""
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        """Reap it."""
        self._process.poll()


def finished_step(step: int) -> bytes:
    """Return the record of a rank that has finished a step."""
    with tempfile.TemporaryDirectory() as folder:
        writer = HeartbeatFile(Path(folder), 0)
        writer.write(step, Phase.TRAINING)
        writer.close()
        return read_record(Path(folder), 0)
