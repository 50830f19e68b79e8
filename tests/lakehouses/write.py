"""Write a small lakehouse with runs of every kind, as an archive: `python -m tests.lakehouses.write ARCHIVE`.

tests/contract/test_format.py opens the archive of each format version with the current code. Write a new one before
a stored format changes, and keep the rest.

The runs: `launched` (two real ranks, one killed, stopped, rewound with an exclusion, named, exported, verified), `forked`
from it, `mixed`, `packed`, `transformed` (one rank each, killed in the middle), `followed` (caught up with its table).
"""

import os
import shutil
import signal
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import PROGRAMS, Arena
from tests.integration.audit_runs import Workshop
from tests.integration.test_cli import dlac

_ORDER = {"batch_size": 16, "key_groups": 4, "seed": 5}
_LAST_STEP = 33
"""Step of `packed` and `mixed` at which they were killed."""


def launched_spec(arena: Arena) -> JobSpec:
    """Return the job spec of the run with two ranks, whose script is in the lakehouse's folder."""
    return arena.spec("launched", script=str(arena.home / "train.py"), every_steps=5, passes=4, pause_s=0.1)


def specs(home: Path) -> dict[str, dict[str, Any]]:
    """Return the job specs of the runs that are trained in this process."""
    first = {"table": "src.a", "columns": ["row_id"], "weight": 0.7, "passes": 2}
    second = {"table": "src.b", "columns": ["row_id"], "weight": 0.3, "row_filter": "odd = true"}
    documents = {"table": "src.a", "columns": ["tokens"]}
    transformed = {"table": "src.a", "columns": ["row_id"]}
    transformed |= {"transform": f"{home}/some.py:some", "on_reject": "quarantine"}
    followed = {"table": "src.f", "columns": ["row_id"], "follow": "appends", "identity_columns": ["row_id"]}
    return {
        "mixed": {"run": "mixed", "source": first, "mixture": [second], "order": _ORDER},
        "packed": {"run": "packed", "source": documents, "order": _ORDER, "sequences": {"length": 16}},
        "transformed": {"run": "transformed", "source": transformed, "order": _ORDER},
        "followed": {"run": "followed", "source": followed, "order": _ORDER},
    }


def _train_alone(home: Path) -> None:
    shop = Workshop(home)
    shop.table("src.a", 0, 400)
    shop.table("src.b", 1000, 200)
    shop.table("src.f", 0, 150)
    by_run = specs(home)
    for run, untils in {"mixed": (14, _LAST_STEP), "packed": (10, _LAST_STEP), "transformed": (14,)}.items():
        for until in untils:
            shop.train(by_run[run], until=until, skip=(3,))
    shop.train(by_run["followed"])
    shop.table("src.f", 150, 90)
    shop.train(by_run["followed"])


def _train_launched(arena: Arena) -> None:
    arena.table(appends=(150, 150, 100))
    shutil.copy(PROGRAMS / "train_tiny.py", arena.home / "train.py")
    spec = launched_spec(arena)
    launch = arena.launch(spec)
    launch.wait_for("checkpoint", 3)
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    launch.wait_for("checkpoint", 6)
    launch.process.send_signal(signal.SIGTERM)
    launch.wait()
    job = arena.home / "launched.yaml"
    job.write_text(yaml.safe_dump(spec.model_dump()))
    for command in (
        ("checkpoint", "tag", "launched", "first", "--step", "5"),
        ("checkpoint", "export", "launched", str(arena.home / "weights.safetensors"), "--step", "10"),
        ("fork", "launched", "--as", "forked", "--spec", str(job), "--step", "10"),
        ("rewind", "launched", "--to-step", "15", "--exclude", "row_id >= 390", "--why", "wrong rows"),
        ("checkpoint", "verify", "launched"),
    ):
        done = dlac(*command, home=arena.home)
        if done.returncode != 0:
            raise SystemExit(f"dlac {' '.join(command)}: {done.stderr}")


def main() -> None:
    """Train all runs in a temporary folder, and pack it."""
    archive = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        home = Path(folder) / "home"
        arena = Arena(home, patch)
        try:
            _train_launched(arena)
            _train_alone(home)
        finally:
            arena.close()
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(home, "home")


if __name__ == "__main__":
    main()
