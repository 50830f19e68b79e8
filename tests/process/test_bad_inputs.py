from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.bad_inputs import FINISHED, SECRET, BadInput, bad_inputs

if TYPE_CHECKING:
    from tests.conftest import Arena

Verdict = dict[str, Any]
QUICK = 40
"""`make test` tries every 40th input, and `make soak` all of them."""


def try_inputs(arena: Arena, cases: list[BadInput]) -> list[Verdict]:
    """Return the verdicts on these inputs, in a lakehouse with a table and a finished run."""
    arena.table(appends=(320,))
    arena.train(arena.spec(FINISHED, world_size=1, passes=1, every_steps=5))
    listed = arena.home / "cases"
    listed.write_bytes(pickle.dumps(cases))
    environment = {**os.environ, "DLAC_HOME": str(arena.home), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = arena.program("try_bad_inputs.py")
    done = subprocess.run(
        [sys.executable, str(program), str(listed)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def fault_of(verdict: Verdict) -> str:
    """Return the fault in the handling of an input, or an empty text if it was refused correctly."""
    output, status = verdict["output"], verdict["status"]
    faults = {
        "hang": status is None,
        "traceback": "Traceback" in output or "bug report" in output,
        "accepted": status == 0,
        "killed": status is not None and status < 0,
        "silent": not output.strip(),
        "secret": SECRET in output,
        "made files": bool(verdict["made"]),
    }
    return next((fault for fault, found in faults.items() if found), "")


def check(arena: Arena, cases: list[BadInput]) -> None:
    """Fail with every input that was not refused by a message without a traceback."""
    runs = {row["run"] for row in arena.lakehouse.read_own("consumption", columns=("run",)).to_pylist()}
    verdicts = try_inputs(arena, cases)
    assert len(verdicts) == len(cases)
    wrong = [f"{fault_of(each)}: {each['kind']}: {each['name']}: {each['output'][-300:]!r} {each['made']}"
             for each in verdicts if fault_of(each)]  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)
    after = {row["run"] for row in arena.lakehouse.read_own("consumption", columns=("run",)).to_pylist()}
    assert after - runs == {FINISHED}


def test_list_is_long_enough() -> None:
    """The list has at least 400 different inputs."""
    cases = bad_inputs("script.py")
    assert len(cases) >= 400
    assert len({(case.kind, case.name) for case in cases}) == len(cases)


@pytest.mark.timeout(600)
def test_some_bad_inputs_are_refused(arena: Arena) -> None:
    """A sample of the bad inputs, of every kind, is refused by a message."""
    check(arena, bad_inputs(str(arena.program("train_tiny.py")))[::QUICK])


@pytest.mark.soak
def test_all_bad_inputs_are_refused(arena: Arena) -> None:
    """No bad input causes a traceback, a missing message, a hang, or a written file or row."""
    check(arena, bad_inputs(str(arena.program("train_tiny.py"))))
