import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.cli.main import app
from dlac_pipeline.extensions.erasure.passport import passport_of
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.bad_files import FINISHED, LAUNCHED, BadInput, Made
from tests.bad_inputs import SECRET, bad_inputs
from tests.conftest import Arena

Verdict = dict[str, Any]
QUICK = 97
"""`make test` tries every 97th input, and `make soak` all of them."""
PROGRAM = Path(__file__).parents[1] / "programs" / "try_bad_inputs.py"


def prepare(arena: Arena) -> Made:
    """Make a table, a finished run and a launched one. Return files that commands read, as DLAC writes them."""
    arena.table(appends=(320,))
    keyed: dict[str, Any] = {"row_keys": True, "identity_columns": ["row_id"]}
    arena.train(arena.spec(FINISHED, world_size=1, passes=1, every_steps=5, **keyed))
    folder, made = arena.home / "launch-1", arena.home / "made"
    folder.mkdir()
    made.mkdir()
    claimed = {"launch_folder": str(folder), "host": socket.gethostname()}
    claim(Ledger(arena.lakehouse), LAUNCHED, nonce="nonce", replaces=0, facts=claimed)
    spec = arena.spec(LAUNCHED).model_dump_json().encode()
    (folder / "spec.json").write_bytes(spec)
    weights, job = made / "weights.safetensors", arena.home / f"{FINISHED}.yaml"
    for arguments in (
        ["checkpoint", "export", FINISHED, weights, "--spec", job],
        ["passport", "write", weights],
        ["forget", "new-key", made / "key.pem"],
    ):
        app(list(map(str, arguments)), standalone_mode=False)
    return Made(
        weights=weights.read_bytes(),
        passport=passport_of(weights).read_bytes(),
        key=(made / "key.pem").read_bytes(),
        public_key=(made / "key.pub.pem").read_bytes(),
        spec=spec,
        parquet=next((arena.home / "warehouse").rglob("src/t/data/*.parquet")).read_bytes(),
    )


def try_inputs(home: Path, cases: list[BadInput]) -> list[Verdict]:
    """Return the verdicts on these inputs, in a lakehouse that `prepare` has made."""
    listed = home / "cases"
    listed.write_bytes(pickle.dumps(cases))
    places = {"DLAC_HOME": str(home), "RECORDED_SPEC": str(home / "launch-1" / "spec.json")}
    environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(listed)], env=environment, capture_output=True, text=True, check=False
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


def test_list_is_long_enough() -> None:
    """The list has at least 800 different inputs."""
    cases = bad_inputs("script.py", Made())
    assert len(cases) >= 800
    assert len({(case.kind, case.name) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "every",
    [pytest.param(QUICK, marks=[pytest.mark.slow, pytest.mark.timeout(600)]), pytest.param(1, marks=pytest.mark.soak)],
)
def test_bad_inputs_are_refused(arena: Arena, every: int) -> None:
    """None of every so many inputs causes a traceback, a missing message, a hang, or a written file or row."""
    cases = bad_inputs(str(PROGRAM.with_name("train_tiny.py")), prepare(arena))[::every]
    verdicts = try_inputs(arena.home, cases)
    assert len(verdicts) == len(cases)
    wrong = [
        f"{fault}: {each['kind']}: {each['name']}: {each['output'][-300:]!r} {each['made']}"
        for each in verdicts
        if (fault := fault_of(each))
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)
    runs = {row["run"] for row in arena.lakehouse.read_own("consumption", columns=("run",)).to_pylist()}
    assert runs == {FINISHED, LAUNCHED}
