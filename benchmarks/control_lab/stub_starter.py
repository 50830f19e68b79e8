"""The one seam between a real supervisor and its stub ranks: a starter that starts `stub_rank.py` in place of the script.

All else of a launch is the product's: its folder, its undertaker, the process group of each rank, the signals.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from dlac_pipeline.ranks.group import RankProcess, Spawned
from dlac_pipeline.ranks.launch_folder import pid_file, progress_file
from dlac_pipeline.ranks.progress import Phase, ProgressWriter, read_record
from dlac_pipeline.ranks.rank import LAUNCH_VARIABLE
from dlac_pipeline.ranks.starter import RankStarter
from dlac_pipeline.spec import JobSpec

_STUB = Path(__file__).with_name("stub_rank.py")


class StubStarter(RankStarter):
    """Starts each rank as a bare Python that imports nothing; there is no fork server."""

    def __init__(self, record: bytes) -> None:
        """`record`: the progress that each rank writes once it has the resume point."""
        super().__init__()
        self._record = record.hex()

    def begin(self, spec: JobSpec) -> None:
        """Import nothing ahead."""

    def __call__(self, spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
        """Start a stub."""
        folder, rank = Path(place[LAUNCH_VARIABLE]), int(place["RANK"])
        files = [folder / "resume.json", pid_file(folder, rank), progress_file(folder, rank)]
        command = [sys.executable, "-I", "-S", str(_STUB), *map(str, files), self._record]
        return Spawned(subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0))


def finished_step(step: int) -> bytes:
    """Return the record of a rank that has finished a step."""
    with tempfile.TemporaryDirectory() as folder:
        writer = ProgressWriter(Path(folder), 0)
        writer.write(step, Phase.TRAINING)
        writer.close()
        return read_record(Path(folder), 0)
