"""Rows that are forgotten: plan, rewinds, retraining, certificate, and the checks of the certificate."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import Table

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.extensions.branches.retire import retire_left
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.erasure.certificate import certify, differences, is_signed, make_key
from dlac_pipeline.extensions.erasure.execution import execute_forget
from dlac_pipeline.extensions.erasure.forget import ForgetPlan, plan_forget
from dlac_pipeline.extensions.erasure.seen import who_has_seen
from dlac_pipeline.extensions.erasure.traces import erase_traces
from dlac_pipeline.extensions.exchange.exported_files import record_exports
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.branches import exclusions_in_force
from dlac_pipeline.lakehouse.ledger.commits import names_of
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ExportRow, NameRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, Steps
from tests.fixtures import Command

KILLED = """
import os, signal, sys
from pathlib import Path
import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.extensions.erasure import execution, traces
from dlac_pipeline.spec.job_spec import read_spec

spec = read_spec(Path(sys.argv[1]))
module, function = sys.argv[2].split(".")
owner = globals()[module]
setattr(owner if hasattr(owner, function) else dlac, function, lambda *args, **rest: os.kill(os.getpid(), signal.SIGKILL))
if module == "execution":
    execution.execute_forget(connect(spec.lakehouse), "src.t", [sys.argv[3]], lambda run: spec)
else:
    traces.erase_traces(connect(spec.lakehouse), "src.t", [sys.argv[3]], lambda run: spec)
"""
SOAK = pytest.mark.soak


class Erasure:
    """A request for one row of a step, in the lakehouse of a test."""

    def __init__(self, arena: Arena, filters: list[str], *specs: JobSpec) -> None:
        self.arena, self.filters = arena, filters
        self.specs = {spec.run: spec for spec in specs}

    def plan(self) -> ForgetPlan:
        """Return the state of the request."""
        return plan_forget(self.arena.lakehouse, "src.t", self.filters)

    def run(self, name: str) -> dict[str, Any]:
        """Return the row of a run in the plan."""
        return next(run for run in self.plan()["runs"] if run["run"] == name)

    def execute(self) -> list[str]:
        """Execute it, and return the steps."""
        return execute_forget(self.arena.lakehouse, "src.t", self.filters, self.specs.get)

    def certify(self) -> tuple[dict[str, Any], Path]:
        """Return a certificate and the public key of its signer."""
        key = self.arena.home / "key.pem"
        public = key.with_suffix(".pub.pem") if key.exists() else make_key(key)
        file = self.arena.home / "certificate.json"
        file.unlink(missing_ok=True)
        return certify(self.arena.lakehouse, "src.t", self.filters, self.specs.get, file=file, key=key), public

    def differences(self, document: dict[str, Any]) -> list[str]:
        """Return the differences from a certificate."""
        return differences(self.arena.lakehouse, document["certificate"], self.specs.get)


def rows_until(steps: Steps, last: int) -> set[int]:
    """Row ids of the steps up to one."""
    return {row for step, rows in steps.items() if step <= last for row in rows}


def small(arena: Arena, run: str, **changes: Any) -> JobSpec:
    """Return a job of one pass over 400 rows in 13 steps, with a checkpoint every second one."""
    return arena.spec(run, **{"world_size": 1, "passes": 1, "every_steps": 2, "keep_last": 0, **changes})


def test_forgotten_row_is_certified(arena: Arena) -> None:
    """The plan names checkpoints and cost; after the retraining, the certificate is signed and the audit is exact."""
    arena.table(appends=(200, 200))
    spec = small(arena, "r")
    steps = arena.train(spec)
    row = steps[7][3]
    erasure = Erasure(arena, [f"row_id = {row}"], spec)
    plan = erasure.plan()
    [run] = plan["runs"]
    assert (plan["rows"]["count"], plan["rows"]["files"], len(plan["problems"])) == (1, 1, 2)
    assert (run["action"], run["first_affected_step"], run["affected_checkpoints"]) == ("rewind", 8, 4)
    assert (run["clean_step"], run["steps_to_replay"], run["samples_to_replay"]) == (6, 7, 7 * 32)
    assert (run["surviving"], run["abandoned"], run["share_of_retraining"]) == (4, 0, round(7 / 13, 4))
    assert arena.head("r") == run["head"]
    with pytest.raises(SpecInvalid, match="is met, found otherwise:\nrun r: expected a head that has not seen"):
        erasure.certify()
    done = erasure.execute()
    assert done[0] == "run r is rewound to step 6 without the rows: resume it with `dlac recover r`"
    assert len(done) == 5
    again = arena.train(spec)
    assert row not in rows_until(again, 99)
    assert rows_until(steps, 6) | rows_until(again, 99) == set(range(400)) - {row}
    document, public = erasure.certify()
    certificate = document["certificate"]
    assert is_signed(document, public)
    [certified] = certificate["runs"]
    assert (certified["head"], len(certified["affected"]), certificate["rows"]["count"]) == (arena.head("r"), 4, 1)
    checkpoints = {each.checkpoint_id: each for each in arena.rows("r", CheckpointRow)}
    assert not any(folder_of(checkpoints[each].manifest_uri).exists() for each in certified["affected"])
    assert certified["losses_of_checkpoints"] == certified["affected"][:1]
    assert audit_run(arena.lakehouse, "r").exact


@pytest.mark.slow
def test_traces_are_erased(arena: Arena) -> None:
    """Keys and losses of the rows are gone from tables, files and journal. Audits and certificates stay."""
    arena.table(appends=(200, 200))
    spec = small(arena, "r", row_keys=True, identity_columns=["row_id"])
    row = arena.train(spec)[7][3]
    erasure = Erasure(arena, [f"row_id = {row}"], spec)
    with pytest.raises(SpecInvalid, match="expected that the rows are forgotten, found otherwise:\nrun r"):
        erase_traces(arena.lakehouse, "src.t", erasure.filters, erasure.specs.get)
    erasure.execute()
    again = arena.train(spec)
    document, _ = erasure.certify()
    assert who_has_seen(arena.lakehouse, [str(row)])["seen_by"]
    [traced] = erasure.run("r")["losses_of_checkpoints"]
    before = {each.checkpoint_id: each.losses for each in arena.rows("r", CheckpointRow)}
    old = [file for name in ("consumption", "row_keys") for file in files_of(arena.lakehouse.own(name))]
    assert len(erase_traces(arena.lakehouse, "src.t", erasure.filters, erasure.specs.get)) == 2
    assert erase_traces(arena.lakehouse, "src.t", erasure.filters, erasure.specs.get) == []
    assert erasure.run("r")["losses_of_checkpoints"] is None
    after = {each.checkpoint_id: each.losses for each in arena.rows("r", CheckpointRow)}
    assert (after.pop(traced), len(before.pop(traced))) == ((), 2)
    assert after == before
    assert who_has_seen(arena.lakehouse, [str(row)])["notes"] == [
        "no checkpoint has seen it: the key is in no keyed data file, or was erased"
    ]
    assert who_has_seen(arena.lakehouse, [str(again[9][0])])["seen_by"]
    table = arena.lakehouse.own("consumption")
    gone = set(old) - {file for name in ("consumption", "row_keys") for file in files_of(arena.lakehouse.own(name))}
    assert gone
    assert not any(Path(file.removeprefix("file://")).exists() for file in gone)
    journal = Journal.of(table)
    entries = journal.read(journal.entries("r")["r"].values())
    expected = arena.lakehouse.read_own("consumption")
    assert (
        entries.sort_by([("seq", "ascending")])["losses"].to_pylist() == expected.sort_by("seq")["losses"].to_pylist()
    )
    assert erasure.differences(document) == []
    assert audit_run(arena.lakehouse, "r").exact


@SOAK
@pytest.mark.parametrize("place", ["_rewrite", "_erase_losses", "expire", "remove_orphans"])
def test_killed_erasure_is_finished(arena: Arena, place: str) -> None:
    """SIGKILL before keys, losses, snapshots or files are erased: the next call erases the rest."""
    arena.table(appends=(400,))
    spec = small(arena, "r", row_keys=True, identity_columns=["row_id"])
    row = arena.train(spec)[7][3]
    erasure = Erasure(arena, [f"row_id = {row}"], spec)
    erasure.execute()
    arena.train(spec)
    old = [file for name in ("consumption", "row_keys") for file in files_of(arena.lakehouse.own(name))]
    path = arena.home / "job.yaml"
    path.write_text(spec.model_dump_json())
    killed = subprocess.run([sys.executable, "-c", KILLED, path, f"traces.{place}", *erasure.filters], check=False)
    assert killed.returncode == -signal.SIGKILL
    erase_traces(arena.lakehouse, "src.t", erasure.filters, erasure.specs.get)
    assert erase_traces(arena.lakehouse, "src.t", erasure.filters, erasure.specs.get) == []
    kept = [file for name in ("consumption", "row_keys") for file in files_of(arena.lakehouse.own(name))]
    assert not any(Path(file.removeprefix("file://")).exists() for file in set(old) - set(kept))
    assert not who_has_seen(arena.lakehouse, [str(row)])["seen_by"]
    assert audit_run(arena.lakehouse, "r").exact


def files_of(table: Table) -> list[str]:
    """Return the data files of a table."""
    return [str(path) for path in table.inspect.files()["file_path"].to_pylist()]


@pytest.mark.slow
def test_fork_after_rows_begins_again(arena: Arena) -> None:
    """A fork from before the rows is rewound, one from after them is listed with its commands, and blocks the certificate."""
    arena.table(appends=(400,))
    parent = small(arena, "p")
    steps = arena.train(parent)
    before, after = small(arena, "before", seed=5), small(arena, "after", seed=6)
    fork_run(arena.lakehouse, before, "p", step=4)
    fork_run(arena.lakehouse, after, "p", step=8)
    erasure = Erasure(arena, [f"row_id = {steps[6][0]}"], parent, before, after)
    assert steps[6][0] not in rows_until(arena.train(after, until=3), 2), "else choose another seed"
    runs = {run["run"]: run["action"] for run in erasure.plan()["runs"]}
    assert runs == {"p": "rewind", "before": "rewind", "after": "fork again"}
    erasure.execute()
    assert arena.train(parent)[9]
    commands = erasure.run("after")["commands"]
    retrained = next(row for row in arena.lineage("p") if row.step == 8)
    assert commands.startswith(f"dlac fork p --checkpoint {retrained.checkpoint_id} --as NEW")
    with pytest.raises(SpecInvalid, match="run after: expected no restorable checkpoint"):
        erasure.certify()
    new = small(arena, "new", seed=6)
    fork_run(arena.lakehouse, new, "p", checkpoint_id=retrained.checkpoint_id)
    erasure.specs["new"] = new
    assert [line.split(" is ")[0] for line in erasure.execute()] == ["run new"]
    retire_left(Ledger(arena.lakehouse), "after", whole=True)
    with pytest.raises(SpecInvalid, match=r"expected no weights in .*after"):
        erasure.certify()
    for folder in (arena.home / "checkpoints" / "after").glob("attempt-*/step-*"):
        subprocess.run(["rm", "-r", folder], check=True)
    arena.train(before)
    arena.train(new)
    document, _ = erasure.certify()
    assert {run["run"] for run in document["certificate"]["runs"]} == {"p", "before", "after", "new"}


@pytest.mark.slow
@SOAK
def test_tags_exports_and_branches_are_cleared(arena: Arena) -> None:
    """Tags on affected checkpoints are removed, abandoned ones are retired, exports are listed, and clean ones stay."""
    arena.table(appends=(400,))
    spec = small(arena, "r")
    steps = arena.train(spec, until=11)
    ledger = Ledger(arena.lakehouse)
    name_checkpoint(ledger, "r", "best", step=10)
    name_checkpoint(ledger, "r", "early", step=2)
    exported = next(row.checkpoint_id for row in arena.lineage("r") if row.step == 8)
    record_exports(ledger, "r", [ExportRow(checkpoint_id=exported, digest="d1", bytes=1, file="w.safetensors")])
    rewind_run(arena.lakehouse, "r", nonce="op", target=2, exclude=["row_id = 7"])
    arena.train(spec, until=5)
    row = steps[7][0]
    erasure = Erasure(arena, [f"row_id = {row}"], spec)
    run = erasure.run("r")
    assert (run["action"], run["abandoned"], run["surviving"], run["tags"]) == ("rewind", 2, 0, ["best"])
    assert run["exports_to_delete_or_replace"] == [f"w.safetensors of {exported}, BLAKE3 d1"]
    assert any(line.startswith("tag best of run r is removed") for line in erasure.execute())
    assert list(names_of(arena.rows("r", NameRow))) == ["early"]
    assert [each.where for each in exclusions_in_force(arena.rows("r"))] == ["row_id = 7", f"row_id = {row}"]
    assert rows_until(arena.train(spec), 99).isdisjoint({7, row} - rows_until(steps, 2))
    document, _ = erasure.certify()
    assert document["certificate"]["runs"][0]["exports_to_delete_or_replace"]


@SOAK
def test_later_request_keeps_earlier_exclusion(arena: Arena) -> None:
    """A request whose clean checkpoint is before the rewind of another one repeats its exclusion."""
    arena.table(appends=(400,))
    spec = small(arena, "r")
    steps = arena.train(spec)
    first = Erasure(arena, [f"row_id = {steps[9][0]}"], spec)
    first.execute()
    again = arena.train(spec)
    second = Erasure(arena, [f"row_id = {steps[3][0]}"], spec)
    second.execute()
    assert rows_until(arena.train(spec), 99).isdisjoint({steps[9][0], steps[3][0]})
    assert steps[9][0] not in rows_until(again, 99)
    for erasure in (first, second):
        assert erasure.certify()


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [pytest.param("rewind_run", marks=SOAK), "retire_checkpoints", pytest.param("LeftWeights", marks=SOAK)]
)
def test_killed_execution_is_repeated(arena: Arena, step: str) -> None:
    """However far a killed execution came, its repetition ends in the same state."""
    arena.table(appends=(400,))
    spec = small(arena, "r")
    steps = arena.train(spec)
    erasure = Erasure(arena, [f"row_id = {steps[7][0]}"], spec)
    path = arena.home / "job.yaml"
    path.write_text(spec.model_dump_json())
    killed = subprocess.run([sys.executable, "-c", KILLED, path, f"execution.{step}", *erasure.filters], check=False)
    assert killed.returncode == -signal.SIGKILL
    erasure.execute()
    assert erasure.execute() == []
    run = erasure.run("r")
    assert (run["action"], run["retired"], run["head_step"]) == ("none", 4, 6)
    assert len(run["filters_in_rewinds"]) == 1
    arena.train(spec)
    assert erasure.certify()


@pytest.mark.slow
def test_commands_forget_and_verify(arena: Arena, here: Command, tmp_path: Path) -> None:
    """The commands plan, execute, certify and verify, and a verification that fails has another exit status."""
    arena.table(appends=(200,))
    spec = small(arena, "r")
    row = arena.train(spec)[5][0]
    (arena.home / "job.yaml").write_text(spec.model_dump_json())
    common = ("src.t", "--where", f"row_id = {row}", "--spec", str(arena.home / "job.yaml"))
    assert json.loads(here("forget", "rows", *common, "--json", home=arena.home).stdout)["runs"][0]["clean_step"] == 4
    assert "steps to replay" in here("forget", "rows", *common, home=arena.home).stdout
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.json"
    make_key(key)
    done = here("forget", "rows", *common, "--execute", home=arena.home)
    assert "dlac recover r" in done.stdout, done.stderr
    arena.train(spec)
    made = here("forget", "rows", *common, "--certify", str(certificate), str(key), home=arena.home)
    assert made.returncode == 0, made.stderr
    check = ("forget", "verify", str(certificate), "--key", str(tmp_path / "key.pub.pem"), *common[3:])
    verified = here(*check, home=arena.home)
    assert (verified.returncode, verified.stdout.splitlines()[-1]) == (0, "the lakehouse is as certified")
    certificate.write_text(certificate.read_text().replace('"head_step": 7', '"head_step": 8'))
    refused = here(*check, home=arena.home)
    assert (refused.returncode, "signature does not match" in refused.stdout) == (1, True)
