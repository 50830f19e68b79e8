"""A catalog that an older backup replaces during a run, which ends by name, and one whose writer was killed."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import LedgerOlderThanStore
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import Arena
from tests.integration.test_older_ledger import check_refused, files_of, restore_catalog

_HALF_A_COMMIT = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 1")
database.execute("BEGIN IMMEDIATE")
database.execute("CREATE TABLE filler (content BLOB)")
database.execute("DELETE FROM iceberg_tables")
database.executemany("INSERT INTO filler VALUES (zeroblob(4096))", [()] * 100)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "every_steps", "after"),
    [
        pytest.param("copied", 5, 2, id="copied over"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.soak)
            for name, case in {
                "moved over": ("moved", 5, 2),
                "metadata gone": ("copied", 1, 20),
                "before its claim": ("moved", 5, 0),
                "no commit due": ("copied", 30, 1),
            }.items()
        ),
    ],
)
def test_live_run_reports_older_catalog(arena: Arena, how: str, every_steps: int, after: int) -> None:
    """The backup was made before or after the run's claim. The launch ends with `LedgerOlderThanStore`, and so do all ranks."""
    arena.table()
    spec = arena.spec("r", every_steps=every_steps, pause_s=0.05, passes=20)
    backup = arena.home / "backup.db"
    if not after:
        shutil.copy(arena.home / "catalog.db", backup)
    launch = arena.launch(spec)
    launch.wait_for("checkpoint")
    if after:
        shutil.copy(arena.home / "catalog.db", backup)
    launch.wait_for("checkpoint", 1 + max(after, 1))
    before = files_of(arena)
    restore_catalog(arena, backup, how=how)
    assert launch.wait() == LedgerOlderThanStore.exit_code, launch.stderr
    assert launch.of("error")[0]["kind"] == "LedgerOlderThanStore"
    assert "restore the newest backup" in launch.of("error")[0]["message"]
    assert launch.ranks() == []
    checkpoints = {path for path in before if "/checkpoints/" in str(path) and "launch" not in str(path)}
    assert checkpoints <= files_of(arena)
    check_refused(arena, spec)


@pytest.mark.parametrize("create", [True, False])
def test_killed_commit_is_rolled_back(tmp_path: Path, create: bool) -> None:
    """A process was killed inside a transaction. The next process that opens the catalog rolls it back."""
    config = LakehouseConfig().at_home(tmp_path)
    connect(config)
    file = tmp_path / "catalog.db"
    before = file.read_bytes()
    killed = subprocess.run([sys.executable, "-c", _HALF_A_COMMIT, str(file)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "catalog.db-journal").stat().st_size > 0
    assert file.read_bytes() != before
    assert Ledger(connect(config, create=create)).runs() == []
    assert not (tmp_path / "catalog.db-journal").exists()
