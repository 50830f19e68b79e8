import subprocess
import sys
from pathlib import Path

import pytest

from dlac_pipeline.extensions.termination_url.termination_url import announces_end
from tests.forked import Forked

FORKS = """
import multiprocessing, signal, time
from dlac_pipeline.train.termination_notice import Notices
from dlac_pipeline.spec.launch_spec import LaunchSpec

notices = Notices(LaunchSpec(script="x"), local_rank=0, launched=False, on_deadline=lambda: None)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(120,))
child.start()
time.sleep(0.5)
child.terminate()
child.join(60)
time.sleep(1.0)
print(child.exitcode, notices.first)
signal.raise_signal(signal.SIGUSR1)
print(notices.first.name)
notices.close()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""

OWN_HANDLER = """
import signal, sys, time
from pathlib import Path
from dlac_pipeline.train.termination_notice import Notices
from dlac_pipeline.spec.launch_spec import LaunchSpec

stop = Path(sys.argv[1])
notices = Notices(LaunchSpec(script="x"), local_rank=0, launched=False, on_deadline=lambda: None, stop_file=stop)
signal.signal(signal.SIGTERM, lambda *_: print("the script's own"))
signal.raise_signal(signal.SIGTERM)
time.sleep(1.5)
print(notices.first)
stop.touch()
while notices.first is None:
    time.sleep(0.02)
print(notices.first.name)
notices.close()
"""

TOO_LATE = """
import os, time
from dlac_pipeline.train.termination_notice import Notices
from dlac_pipeline.spec.launch_spec import LaunchSpec

launch = LaunchSpec(script="x", deadline_s=0.5)
notices = Notices(launch, local_rank=0, launched=False, on_deadline=lambda: (print("too late", flush=True), time.sleep(600)))
os.kill(os.getpid(), 10)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("program", "status", "lines"),
    [
        (FORKS, 0, ["-15 None", "SIGUSR1", "True"]),
        (OWN_HANDLER, 0, ["the script's own", "None", "SIGTERM"]),
        (TOO_LATE, 86, ["too late"]),
    ],
    ids=["worker of a data loader", "script with its own handler", "hang at the deadline"],
)
def test_notice_is_of_its_rank(tmp_path: Path, program: str, status: int, lines: list[str]) -> None:
    """A forked child's signal is no notice, a file is one beside a script's handler, and the watchdog ends a hang."""
    command = [sys.executable, "-c", program, str(tmp_path / "stop")]
    with Forked(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=250)
    assert (process.returncode, output.splitlines()) == (status, lines)


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ('{"action": "terminate", "time": "2026-11-29T17:18:22Z"}', True),
        ("", True),
        ("TRUE", True),
        ("FALSE\n", False),
        ("NONE", False),
        ('{"DocumentIncarnation": 1, "Events": []}', False),
        ('{"Events": [{"EventType": "Freeze"}]}', False),
        ('{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt"}]}', True),
    ],
)
def test_answers_of_clouds_are_known(answer: str, ends: bool) -> None:
    """Google and Azure answer with status 200 also while no termination is planned. Any other text is a notice."""
    assert announces_end(answer) == ends
