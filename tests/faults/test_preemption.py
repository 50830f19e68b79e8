"""A preempted run saves an emergency checkpoint if there is time, and always ends by its deadline."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.conftest import Arena, Launch, wait_until
from tests.faults.undisturbed import check_rows_of_a_pass

TRAINING: dict[str, Any] = {"passes": 1, "pause_s": 0.1}


@contextmanager
def metadata_server() -> Iterator[tuple[str, threading.Event, list[str]]]:
    """Yield the URL of a node's metadata endpoint, the event that makes it a notice, and the tokens of its requests."""
    gone, tokens = threading.Event(), []

    class Endpoint(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(str(self.headers["X-Token"]))
            self.send_response(200 if gone.is_set() else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/terminate", gone, tokens
        server.shutdown()


def wait_for_step(campaign: Arena, run: str, step: int) -> None:
    """Wait until some rank has finished a step."""
    wait_until(lambda: max((e["step"] for e in campaign.entries(run)), default=0) >= step, what=f"step {step}")


def check_gone(ranks: list[psutil.Process]) -> None:
    """Check that no process is left."""
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []


def finish_exactly(campaign: Arena, run: str) -> Launch:
    """Launch the run again, and check that it resumes from the head and that both journals have every row once."""
    again = campaign.launched(campaign.spec(run, passes=1))
    check_rows_of_a_pass(campaign, run)
    return again


@pytest.mark.soak
@pytest.mark.parametrize(
    ("to", "notice"),
    [
        ("a rank", "SIGUSR1"),
        ("a rank", "SIGTERM"),
        ("the tree", "SIGTERM"),
        ("the spawned tree", "SIGTERM"),
        ("the url", "termination_url"),
    ],
)
def test_notice_makes_one_checkpoint(campaign: Arena, to: str, notice: str) -> None:
    """A signal to one rank or the whole tree, or the URL's answer: all ranks exit after one checkpoint, with no new launch."""
    run, start = f"noticed-{to.replace(' ', '-')}-{notice}", "spawn" if "spawned" in to else "fork"
    with metadata_server() as (url, gone, tokens):
        endpoint: dict[str, Any] = (
            {"termination_url": url, "termination_headers": {"X-Token": "abc"}} if "url" in to else {}
        )
        launch = campaign.launch(campaign.spec(run, start=start, **endpoint, **TRAINING))
        launch.wait_for("checkpoint", 2 if endpoint else 1)
        tree = [psutil.Process(launch.process.pid), *psutil.Process(launch.process.pid).children(recursive=True)]
        assert len(tree) == (5 if start == "fork" else 4)
        if endpoint:
            gone.set()
        else:
            for process in [launch.ranks()[1]] if to == "a rank" else tree:
                process.send_signal(signal.Signals[notice])
        assert launch.wait() == 0, launch.stderr
    check_gone(tree)
    assert set(tokens) == ({"abc"} if endpoint else set())
    (preempted,) = launch.of("preempted")
    facts = [preempted[name] for name in ("notice", "committed", "lost_steps", "lost_rows", "deadline_s")]
    assert facts == [notice, True, 0, 0, 20.0]
    assert launch.of("ended")[0]["ending"] == "stopped"
    assert launch.of("checkpoint")[-1]["reason"] == notice
    assert campaign.lineage(run)[-1].step == preempted["step"] < 63
    assert finish_exactly(campaign, run).of("attempt")[0]["step"] == preempted["step"]


@pytest.mark.slow
def test_stop_before_training_is_no_failure(campaign: Arena) -> None:
    """A run that is stopped before its first step, and trained later, has no incident."""
    run = "stopped-early"
    launch = campaign.launch(campaign.spec(run, passes=1))
    launch.wait_for("attempt")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert launch.of("ended")[0]["ending"] == "stopped"
    assert campaign.launch(campaign.spec(run, passes=1)).wait() == 0
    assert recoveries_of(campaign.lakehouse, run) == []


@pytest.mark.soak
def test_no_checkpoint_without_time(campaign: Arena) -> None:
    """Commits take 3 s and the deadline is 2 s. The ranks exit at once, the head stays, and the log has the lost work."""
    run = "no-time"
    spec = campaign.spec(run, "train_sabotaged.py", deadline_s=2.0, env={"COMMIT_SLEEPS_S": "3"}, **TRAINING)
    launch = campaign.launch(spec)
    launch.wait_for("checkpoint")
    wait_for_step(campaign, run, 13)
    ranks = launch.ranks()
    os.kill(launch.process.pid, signal.SIGTERM)
    launch.wait()
    check_gone(ranks)
    preempted = launch.of("preempted")[-1]
    assert not preempted["committed"]
    head = campaign.lineage(run)[-1]
    assert head.step == 10
    assert preempted["lost_steps"] == preempted["step"] - 10 > 0
    assert preempted["lost_rows"] == preempted["lost_steps"] * 32
    log = "".join(path.read_text() for path in (campaign.home / "checkpoints" / run).glob("launch-*/rank-*.log"))
    assert f"checkpoint {head.checkpoint_id!r} of step 10 stays the head, and {preempted['lost_steps']} steps" in log
    assert finish_exactly(campaign, run).of("attempt")[0]["step"] == 10


@pytest.mark.soak
def test_slow_checkpoint_is_abandoned_at_deadline(campaign: Arena) -> None:
    """The emergency checkpoint hangs before its commit. All ranks end by the deadline, and the old head stays."""
    run = "too-long"
    spec = campaign.spec(run, "train_sabotaged.py", deadline_s=4.0, env={"COMMIT_SLEEPS_S": "0,600"}, **TRAINING)
    launch = campaign.launch(spec)
    launch.wait_for("checkpoint")
    ranks = launch.ranks()
    os.kill(ranks[0].pid, signal.SIGUSR1)
    assert launch.wait() == 86, launch.stderr  # the wait is shorter than the hanging commit
    check_gone(ranks)
    (error,) = launch.of("error")
    assert error["kind"] == "Preempted"
    assert "of step 10 stays the head" in error["message"]
    assert [event["committed"] for event in launch.of("preempted")] == [False]
    assert campaign.lineage(run)[-1].step == 10
    assert len(launch.of("attempt")) == 1
    finish_exactly(campaign, run)


@pytest.mark.soak
def test_rank_waiting_for_stopped_one_exits(campaign: Arena) -> None:
    """One rank is frozen. The other waits for it in a collective, without Python handlers, and its watchdog ends it."""
    run = "frozen"
    launch = campaign.launch(campaign.spec(run, deadline_s=3.0, **TRAINING))
    launch.wait_for("checkpoint")
    ranks = launch.ranks()
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert launch.wait() == 86, launch.stderr
    check_gone(ranks)
    assert launch.of("preempted")[0]["notice"] == "SIGTERM"
    finish_exactly(campaign, run)


@pytest.mark.soak
def test_checkpoint_in_progress_is_awaited(campaign: Arena) -> None:
    """Background commits take 6 s and the deadline is 9 s. The one in flight becomes the head, and no other begins."""
    run = "under-way"
    changes = {"mode": "asynchronous", "deadline_s": 9.0, "env": {"COMMIT_SLEEPS_S": "6"}}
    launch = campaign.launch(campaign.spec(run, "train_sabotaged.py", every_steps=20, **changes, **TRAINING))
    launch.wait_for("checkpoint")
    wait_for_step(campaign, run, 42)
    os.kill(launch.process.pid, signal.SIGTERM)
    launch.wait()
    assert [row.step for row in campaign.lineage(run)] == [20, 40]
    preempted = launch.of("preempted")[-1]
    assert preempted["lost_steps"] == preempted["step"] - 40 > 0
    assert finish_exactly(campaign, run).of("attempt")[0]["step"] == 40
