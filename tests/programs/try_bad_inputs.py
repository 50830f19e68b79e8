"""Try bad inputs, each in a process forked after all imports. Reads cases, and prints verdicts as JSON lines."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow.dataset
import torch
import yaml

import dlac_pipeline
from dlac_pipeline.audit import lakehouse_sql
from dlac_pipeline.cli import main as cli
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid
from dlac_pipeline.plan import planner
from dlac_pipeline.read.opening import open_leg
from dlac_pipeline.spec.job_spec import read_spec

if TYPE_CHECKING:
    from tests.bad_files import BadInput

LIMIT_S = 90.0
IMPORTED = (duckdb, pyarrow.dataset, torch, lakehouse_sql, planner, open_leg)


def main() -> None:
    """Read the pickled cases that the first argument names, and print a verdict for each."""
    for case in pickle.loads(Path(sys.argv[1]).read_bytes()):
        print(json.dumps(_verdict(case)), flush=True)


def _verdict(case: BadInput) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="dlac-bad-") as name:
        folder = Path(name)
        for file, content in case.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
        for link, target in case.links.items():
            (folder / link).symlink_to(target)
        if case.recorded is not None:
            Path(os.environ["RECORDED_SPEC"]).write_bytes(case.recorded)
        if case.spec is not None:
            (folder / "spec.yaml").write_text(yaml.safe_dump(case.spec))
        before = {path.relative_to(folder) for path in folder.rglob("*")}
        started = time.monotonic()
        child = os.fork()
        if not child:
            _run(case, folder)
        status = _wait_for(child)
        made = {path.relative_to(folder) for path in folder.rglob("*")} - before
        output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
        return {
            "kind": case.kind,
            "name": case.name,
            "status": status,
            "output": output[-4000:],
            "made": sorted(str(path) for path in made if str(path) != "output"),
            "seconds": round(time.monotonic() - started, 2),
        }


def _wait_for(child: int) -> int | None:
    """Return the exit status of the child, or None if it had to be killed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(case: BadInput, folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(case.environment)
    output = os.open("output", os.O_CREAT | os.O_WRONLY)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 70
    try:
        call = _parse if case.is_parsed else _call_command if case.dataset is None else _call_library
        status = call(case)
    except SystemExit as err:
        status = err.code if isinstance(err.code, int) else int(err.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _call_command(case: BadInput) -> int:
    sys.argv = ["dlac", *case.arguments]
    cli.main()
    return 0


def _parse(case: BadInput) -> int:
    try:
        read_spec(Path("spec.yaml")).resolved(Path("home"))
    except SpecInvalid as err:
        print(err)
        return 2
    return 0


def _call_library(case: BadInput) -> int:
    assert case.dataset is not None
    try:
        rows = sum(1 for _ in dlac_pipeline.open_dataset(**case.dataset))
    except (DlacError, TypeError) as err:
        print(f"{type(err).__name__}: {err}")
        return 2
    print(f"accepted, {rows} batches")
    return 0


if __name__ == "__main__":
    main()
