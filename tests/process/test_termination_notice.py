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


def run(program: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a program in a separate process, and return its exit status and its lines."""
    with Forked([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=250)
    return process.returncode, output.splitlines()


def test_signal_to_forked_child_stays_there() -> None:
    """A terminated worker of a data loader dies of the signal, and the rank that forked it has no termination notice."""
    assert run(FORKS) == (0, ["-15 None", "SIGUSR1", "True"])


def test_file_requests_stop_as_well(tmp_path: Path) -> None:
    """A script that handles SIGTERM itself gets the signal, and the file in the launch folder is the notice."""
    assert run(OWN_HANDLER, str(tmp_path / "stop")) == (0, ["the script's own", "None", "SIGTERM"])


def test_process_ends_at_deadline_despite_hang() -> None:
    """The watchdog calls its function in a thread, and waits for it at most a second."""
    assert run(TOO_LATE) == (86, ["too late"])


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
