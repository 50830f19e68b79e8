"""Scripts with bugs: a run ends after two equal exceptions at one place, and no innocent row is left out."""

from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import FinishRow, QuarantinedCheckpointRow
from tests.conftest import Arena

SCRIPT_FAILED = 89


@pytest.mark.parametrize(
    ("bug", "settings", "attempts", "message"),
    [
        ("step", {"at": 1}, 2, "ZeroDivisionError: no way past step 1"),
        pytest.param("step", {"at": 5}, 4, "ZeroDivisionError: no way past step 5", marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("import", {"env": {"IMPORT_BUG": "1"}}, 2, "ModuleNotFoundError"),
                ("start", {}, 2, "KeyError"),
                ("step", {"at": 5, "every_steps": 1}, 4, "in compute"),
                ("other_steps", {}, 2, "ZeroDivisionError"),
                ("between", {"at": 3}, 2, "IndexError: the evaluation has no such metric"),
                ("exit", {"at": 3}, 2, "SystemExit: 3"),
                ("shape", {"at": 1}, 2, "in compute"),
                ("rank_1", {"at": 2, "world_size": 2}, 2, "NameError: name 'undefined_name'"),
            )
        ),
    ],
)
def test_repeated_exception_stops_run(
    campaign: Arena, bug: str, settings: dict[str, Any], attempts: int, message: str
) -> None:
    """Two attempts end the run. If the rows may be to blame, one more without them follows `deaths_at_same_rows` deaths."""
    run = f"bug-{bug}-{settings.get('at', 0)}-{settings.get('every_steps', 0)}"
    spec = campaign.spec(run, "train_raising.py", **{"world_size": 1, "every_steps": 50, "bug": bug, **settings})
    launch = campaign.launch(spec)
    assert launch.wait() == SCRIPT_FAILED, launch.events
    (error,) = launch.of("error")
    assert error["kind"] == "ScriptFailed"
    assert message in error["message"]
    assert "train_raising.py" in error["message"]
    assert "rank-0000" in error["message"]
    assert len(launch.of("attempt")) == attempts
    assert not campaign.rows(run, QuarantinedCheckpointRow)
    (gave_up,) = [each for each in recoveries_of(campaign.lakehouse, run) if each.outcome == "gave up"]
    assert message in gave_up.cause


@pytest.mark.slow
def test_secret_of_ranks_stays_in_them(campaign: Arena) -> None:
    """An exception has values of `launch.env`: neither log, terminal nor ledger has them, and others cannot read the folders."""
    run, secrets = "bug-secret", {"TRACKER_TOKEN": "Hunter2Hunter2", "TRACKER": "k3y-without-a-name"}
    launch = campaign.launch(campaign.spec(run, "train_raising.py", world_size=1, bug="secret", env=secrets))
    assert launch.wait() == SCRIPT_FAILED, launch.events
    folders = list((campaign.home / "checkpoints" / run).glob("launch-*"))
    written = [path for folder in folders for path in folder.iterdir() if path.name != "spec.json"]
    texts = {str(path): path.read_text(errors="replace") for path in written}
    texts |= {"events": str(launch.events), "stderr": launch.stderr}
    texts |= {"recoveries": str(recoveries_of(campaign.lakehouse, run))}
    for secret in secrets.values():
        assert [place for place, text in texts.items() if secret in text] == []
    for place in ("events", "recoveries", str(folders[0] / "rank-00000.log")):
        assert "the tracker refused *** and ***" in texts[place]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["memory", pytest.param("memory_error", marks=pytest.mark.slow)])
def test_failed_allocation_ends_run_at_once(campaign: Arena, bug: str) -> None:
    """Another attempt would need the same memory. The error states this, and names a remedy."""
    launch = campaign.launch(
        campaign.spec(f"bug-{bug}", "train_raising.py", world_size=1, every_steps=50, bug=bug, at=3)
    )
    assert launch.wait() == 91, launch.events
    (error,) = launch.of("error")
    assert error["kind"] == "OutOfMemory"
    assert "could not allocate it: lower order.batch_size" in error["message"]
    assert "train_raising.py" in error["message"]
    assert len(launch.of("attempt")) == 1


@pytest.mark.soak
def test_repaired_script_trains_all_rows(arena: Arena) -> None:
    """The rows that a broken script had in hand are not quarantined. The repaired script trains all of them."""
    arena.table(appends=(300,))
    spec = arena.spec("r", "train_raising.py", world_size=1, passes=1, every_steps=2, bug="step", at=5)
    assert arena.launch(spec).wait() == SCRIPT_FAILED
    arena.launched(spec.model_copy(update={"params": {**spec.params, "bug": ""}}))
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems) == (True, ())
    assert (report.rows_consumed, report.rows_quarantined) == (300, 0)


@pytest.mark.soak
def test_raising_row_is_quarantined(arena: Arena) -> None:
    """A row for which the script raises is left out after three attempts, and the run ends without it."""
    arena.table(appends=(300,))
    spec = arena.spec("r", "train_raising.py", world_size=1, passes=1, every_steps=2, bug="row", row=0)
    batches = arena.train(spec.model_copy(update={"run": "before"}))
    launch = arena.launch(spec.model_copy(update={"params": {**spec.params, "row": str(batches[5][0])}}))
    assert launch.wait() == 0, launch.events
    assert len(launch.of("attempt")) == 4
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems) == (True, ())
    assert (report.rows_consumed, report.rows_quarantined) == (300 - len(batches[5]), len(batches[5]))


@pytest.mark.soak
@pytest.mark.parametrize(("bug", "attempts"), [("os_exit", 4), ("network", 3)])
def test_unexplained_deaths_end_without_progress(campaign: Arena, bug: str, attempts: int) -> None:
    """A bare exit status leads to an attempt with other rows. A transient exception is no bug, and blames no rows."""
    run = f"unexplained-{bug}"
    settings: dict[str, Any] = {"world_size": 2, "every_steps": 50, "bug": bug, "at": 3}
    launch = campaign.launch(campaign.spec(run, "train_raising.py", **settings))
    assert launch.wait() == 85, launch.events
    assert len(launch.of("attempt")) == attempts
    assert not campaign.rows(run, QuarantinedCheckpointRow)
    if bug == "os_exit":
        assert {failure["cause"] for failure in launch.of("failure")} == {"rank 1 died with exit status 3"}


@pytest.mark.soak
def test_failure_after_last_batch_is_reported(campaign: Arena) -> None:
    """The run is finished in the ledger. The launch ends with the script's error, and not with success."""
    run = "bug-afterwards"
    launch = campaign.launch(campaign.spec(run, "train_raising.py", passes=1, world_size=1, bug="afterwards"))
    assert launch.wait() == 72
    assert "exporting the model failed" in launch.of("error")[0]["message"]
    assert campaign.rows(run, FinishRow)
