"""An accelerated day of continual training: a changing table, killed scheduled runs, and a final check of all rows."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.dagster.sensors.continual import DUE_TAG, due_key
from dlac_pipeline.dagster.sensors.pending_work import due
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints
from dlac_pipeline.extensions.upkeep.pins import list_pins
from dlac_pipeline.lakehouse.ledger.typed_rows import LegRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.spec.job_spec import JobSpec, read_spec
from dlac_pipeline.supervise.liveness.launch_liveness import is_lock_held
from dlac_pipeline.supervise.liveness.run_lock import lock_path
from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import LocalDagster
from tests.conftest import PROGRAMS, Arena, source_rows, wait_until
from tests.programs.source_day import HOURS, SEED, Source, log_file

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings

RUN = "day"
BATCH, KEEP = 16, 3
HOUR_S = 8.0
VICTIMS = ("rank", "supervisor", "dagster run")


class Killer:
    """A killer of the run's processes, each time in the first seconds of training."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._dice = random.Random(SEED)
        self._at = 0.0
        self._last_rank: object = None
        self.killed: Counter[str] = Counter()

    def kill_if_due(self) -> None:
        """Kill a process if it is time. A launch trains for up to three seconds first."""
        rank, progress = self._live.rank(0), self._live.progress()
        if rank is None or progress is None or progress.step == 0:
            return
        if rank != self._last_rank:
            self._last_rank, self._at = rank, time.monotonic() + self._dice.uniform(0, 3)
        if time.monotonic() < self._at:
            return
        victim = VICTIMS[self.killed.total() % len(VICTIMS)]
        if self._strike(victim):
            self.killed[victim] += 1
            self._at = time.monotonic() + self._dice.uniform(8, 20)

    def _strike(self, victim: str) -> bool:
        if victim == "dagster run":
            return self._live.kill_dagster_run()
        process = self._live.supervisor() if victim == "supervisor" else self._live.rank(self._dice.randrange(2))
        if process is None:
            return False
        process.kill()
        return True


@pytest.fixture
def dagster(arena: Arena, job: Path, tmp_path: Path) -> Iterator[LocalDagster]:
    """A daemon that evaluates DLAC's schedules every few seconds, and knows that job."""
    workspace = tmp_path / "workspace.yaml"
    program = PROGRAMS / "day_in_fast_motion.py"
    workspace.write_text(
        yaml.safe_dump({"load_from": [{"python_file": {"relative_path": str(program), "location_name": "dlac"}}]})
    )
    local_dagster = LocalDagster(arena.home, workspace=workspace)
    with local_dagster.running():
        yield local_dagster


@pytest.mark.soak
def test_day_of_continual_training_ends_exact(arena: Arena, job: Path, dagster: LocalDagster) -> None:
    """24 hours of appends, deletes, merges and expiries. Each row is read once if it was live."""
    spec = read_spec(job).resolved(arena.home)
    killer = Killer(LiveRun(spec.checkpoint.store, RUN))
    command = [sys.executable, "-m", "tests.programs.source_day", str(arena.home)]
    with subprocess.Popen(command, cwd=PROGRAMS.parents[1], stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        for _ in range(HOURS):
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            pass_an_hour(arena, killer)
    assert writer.returncode == 0
    assert min(killer.killed[victim] for victim in VICTIMS) >= 2, killer.killed
    wait_until_trained(arena, dagster, job)
    source, changes = Source(arena.home), logged_changes(arena)
    source.next_id = max(row for each in changes if each["what"] == "append" for row in each["rows"]) + 1
    waiting = len(never_deleted(changes) - set(rows_read(arena)))
    source.append(BATCH - waiting % BATCH)  # the missing rows of a batch
    wait_until_trained(arena, dagster, job)
    check_rows(arena, logged_changes(arena))
    check_clean_end(arena, dagster, spec)


def pass_an_hour(arena: Arena, killer: Killer) -> None:
    """Wait some seconds, or longer until a step was trained: launches take long on a busy node."""
    began, before = time.monotonic(), journal_bytes(arena)
    while (passed_s := time.monotonic() - began) < HOUR_S or (journal_bytes(arena) == before and passed_s < 5 * HOUR_S):
        killer.kill_if_due()
        time.sleep(0.02)


def journal_bytes(arena: Arena) -> int:
    """Return the bytes of the training script's journals."""
    return sum(path.stat().st_size for path in (arena.home / "journal").iterdir())


@pytest.fixture
def job(arena: Arena) -> Path:
    """A job that follows a table, which is empty yet."""
    properties = {"write.parquet.row-group-limit": "50"}
    arena.lakehouse.catalog.create_table("src.t", source_rows(0, 1).schema, properties=properties)
    follows: dict[str, Any] = {"follow": "appends", "identity_columns": ["row_id"], "on_overwrite": "read"}
    kept: dict[str, Any] = {"every_steps": 4, "keep_last": KEEP, "pause_s": 0.2}
    spec = arena.spec(RUN, batch_size=BATCH, key_groups=4, passes=1, **follows, **kept)
    job = arena.home / "jobs" / "day.yaml"
    job.parent.mkdir()
    job.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
    return job


def logged_changes(arena: Arena) -> list[dict[str, Any]]:
    """Return the changes that the writer has logged."""
    return [json.loads(line) for line in log_file(arena.home).read_text().splitlines()]


def wait_until_trained(arena: Arena, dagster: LocalDagster, job: Path) -> None:
    """Wait until the current snapshot is trained completely and no run is active."""
    spec = read_spec(job).resolved(arena.home)

    def is_trained() -> bool:
        time.sleep(1)
        found = due(arena.lakehouse, spec)
        seen = {DUE_TAG: due_key(spec, found)}
        with dagster.instance() as instance:
            if not all(run.is_finished for run in instance.get_runs(dg.RunsFilter(tags={RUN_TAG: RUN}))):
                return False
            done = dg.RunsFilter(tags=seen, statuses=[dg.DagsterRunStatus.SUCCESS])
            return not found.needed or bool(instance.get_runs(done))

    wait_until(is_trained, what="the end of the pending rows", within_s=600)


def rows_read(arena: Arena) -> list[int]:
    """Return the rows that the training script read on the surviving lineage, by its journal."""
    return [row for rows in arena.journal(RUN).values() for row in rows]


def never_deleted(changes: list[dict[str, Any]]) -> set[int]:
    """Return the rows that are live at the end, by the writer's log."""
    rows: set[int] = set()
    for each in changes:
        if each["what"] == "append":
            rows |= set(each["rows"])
        elif each["what"].startswith("delete"):
            rows -= set(each["rows"])
    return rows


def check_rows(arena: Arena, changes: list[dict[str, Any]]) -> None:
    """Check that no row was read twice or after its deletion, and that all rows that were never deleted were read."""
    seen = Counter(rows_read(arena))
    assert set(seen.values()) == {1}
    live = never_deleted(changes)
    assert live <= set(seen), f"never read: {sorted(live - set(seen))}"
    order = {each["snapshot_id"]: at for at, each in enumerate(changes) if "snapshot_id" in each}
    appended_at = {row: at for at, each in enumerate(changes) if each["what"] == "append" for row in each["rows"]}
    deleted_at = {
        row: at for at, each in enumerate(changes) if each["what"].startswith("delete") for row in each["rows"]
    }
    legs = {row.leg: Leg.from_record(row.record) for row in arena.rows(RUN, LegRow)}
    steps, last = arena.journal(RUN), 0
    for checkpoint in arena.lineage(RUN):
        planned = order[legs[checkpoint.leg].sources[0].snapshot_id]
        for row in [row for step in range(last + 1, checkpoint.step + 1) for row in steps[step]]:
            assert appended_at[row] <= planned, f"row {row} of step {checkpoint.step} was appended later"
            assert deleted_at.get(row, len(changes)) > planned, (
                f"row {row} of step {checkpoint.step} was deleted before"
            )
        last = checkpoint.step
    report = audit_run(arena.lakehouse, RUN)
    assert report.exact, report
    assert (report.rows_consumed, report.rows_pending) == (len(seen), 0)
    assert set(deleted_at) - set(seen), "no row was deleted before it was read"
    assert set(deleted_at) & set(seen), "no row was deleted after it was read"


def check_clean_end(arena: Arena, dagster: LocalDagster, spec: JobSpec) -> None:
    """Check that no unneeded process, lock, checkpoint or pin exists, snapshots can be expired, and upkeep succeeded."""
    with dagster.instance() as instance:
        upkeep = [run.status for run in instance.get_runs(dg.RunsFilter(job_name="upkeep_job")) if run.is_finished]
    assert set(upkeep) == {dg.DagsterRunStatus.SUCCESS}
    wait_until(lambda: not trainers(), what="the end of all its processes", within_s=30)
    assert not is_lock_held(lock_path(spec.checkpoint.local, RUN))
    folders = list((Path(spec.checkpoint.store) / RUN).glob("attempt-*/step-*"))
    assert len([each for each in list_checkpoints(arena.lakehouse, RUN) if each.state in ("head", "kept")]) == KEEP
    assert len(folders) == KEEP
    assert all(any(each.iterdir()) for each in (Path(spec.checkpoint.store) / RUN).glob("attempt-*"))
    pins = list_pins(arena.lakehouse, spec.source.table)
    assert all(pin.needed_by == (RUN,) for pin in pins), pins
    assert len(pins) <= 3 * KEEP
    Source(arena.home).expire(int(time.time() * 1000))
    assert len(arena.lakehouse.load(spec.source.table).snapshots()) <= len(pins) + 1
    assert audit_run(arena.lakehouse, RUN).exact  # although data files no longer exist


def trainers() -> list[psutil.Process]:
    """Return the processes of the run."""
    return [
        one for one in psutil.process_iter(["cmdline"]) if f"dlac {RUN} rank" in " ".join(one.info["cmdline"] or ())
    ]
