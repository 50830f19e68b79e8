"""What the `dlac` command does about faults of its surroundings, and about exceptions that nothing expects."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import dlac_pipeline as dlac
from dlac_pipeline.extensions.registration.new_project import scaffold_job
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured, CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from tests.conftest import Arena
from tests.fixtures import Command

_READS = (
    *(("status", "r"), ("checkpoint", "list", "r"), ("audit", "r"), ("incidents",), ("table", "pins")),
    *(("sql", "FROM checkpoints"), ("ledger", "upkeep"), ("checkpoint", "retire", "r"), ("rehearse", "r")),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A lakehouse with a finished run whose last losses are NaN."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Arena(tmp_path_factory.mktemp("trained") / "home", monkeypatch)
        arena.table(appends=(100,))
        spec = arena.spec("r", world_size=1, passes=1, every_steps=2, on_nonfinite_loss="warn")
        with arena.training_run(spec) as run:
            run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
            for batch in run.batches():
                run.step_done(math.nan if batch.step > 1 else 0.5)
        yield arena


@pytest.mark.parametrize("arguments", _READS)
def test_looking_makes_nothing(tmp_path: Path, here: Command, arguments: tuple[str, ...]) -> None:
    """With addresses from a job spec too, the error reports that there is no lakehouse, and names the command that makes one."""
    spec = tmp_path / "typo.toml"
    places = f'[lakehouse]\nuri = "sqlite:///{tmp_path}/typo/catalog.db"\nwarehouse = "{tmp_path}/typo/tables"\n'
    spec.write_text(scaffold_job("r") + places)
    refused = here(*arguments, "--spec", str(spec), home=tmp_path / "home")
    assert (refused.returncode, "dlac train" in refused.stderr) == (64, True)
    assert [path.name for path in tmp_path.iterdir()] == ["typo.toml"]


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_lost_metadata_is_named(tmp_path: Path, here: Command, damage: str) -> None:
    """Every command that reads the ledger names the table, the file and a remedy."""
    lakehouse = connect(LakehouseConfig().at_home(tmp_path))
    path = Path(lakehouse.own("consumption").metadata_location.removeprefix("file://"))
    content = path.read_bytes()
    path.unlink()
    if damage == "cut off":
        path.write_bytes(content[:100])
    for arguments in _READS[:3] + _READS[4:7]:
        refused = here(*arguments, home=tmp_path)
        assert refused.returncode == 69, (arguments, refused.stderr)
        assert all(part in refused.stderr for part in ("MetadataLost", "dlac.consumption", "restore")), arguments


@pytest.mark.parametrize(
    "content", [b"this is no database, but a text that is long enough for one" * 9, b"SQLite format 3\0" + b"\1" * 99]
)
def test_damaged_catalog_is_no_outage(tmp_path: Path, content: bytes) -> None:
    """Waiting does not mend a file that SQLite cannot read."""
    (tmp_path / "catalog.db").write_bytes(content)
    with pytest.raises(CatalogMisconfigured, match=r"catalog\.db"):
        connect(LakehouseConfig().at_home(tmp_path))


def test_locked_catalog_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process that holds the lock is named during the wait, and again in the error."""
    config = LakehouseConfig().at_home(tmp_path)
    connect(config)
    hold = "import sqlite3, sys\nc = sqlite3.connect(sys.argv[1], isolation_level=None)\nc.execute('BEGIN EXCLUSIVE')\n"
    command = [sys.executable, "-c", f"{hold}print(1, flush=True)\nsys.stdin.read()", str(tmp_path / "catalog.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(CatalogUnreachable, match=f"process {holder.pid} "):
            connect(config.model_copy(update={"uri": f"{config.uri}?timeout=2.5"}), create=False)
        assert f"found it locked for 2 s; process {holder.pid} " in caplog.text
        holder.kill()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "r", "--json"),
        ("status", "r", "--json", "--watch"),
        ("audit", "r", "--json"),
        ("sql", "SELECT 'nan'::DOUBLE AS a, ['inf'::FLOAT] AS b", "--json"),
    ],
)
def test_json_is_strict(trained: Arena, here: Command, arguments: tuple[str, ...]) -> None:
    """A loss that is NaN is null, so that every reader of JSON can read the output."""
    done = here(*arguments, home=trained.home)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"found {name}"))


def test_unexpected_exception_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Command) -> None:
    """The traceback is in a file that only this user may read, and the exit status reports a bug."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    fails = Mock(side_effect=KeyError("[/b] of nothing"))
    monkeypatch.setattr("dlac_pipeline.lakehouse.iceberg.connect.connect", fails)
    done = here("status", "r", home=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (70, "", 1)
    assert "unexpected KeyError: '[/b] of nothing'" in done.stderr
    [log] = tmp_path.glob("dlac-error-*.log")
    assert str(log) in done.stderr
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_leaving_early_is_quiet(trained: Arena) -> None:
    """A reader such as `head` that has gone prints nothing."""
    program = str(Path(sys.executable).parent / "dlac")
    command = [program, "sql", "FROM range(200000)", "--json", "--home", str(trained.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
    assert process.returncode in (0, 128 + signal.SIGPIPE)  # 0: all was in the pipe by then
