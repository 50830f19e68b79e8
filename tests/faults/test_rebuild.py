"""`dlac ledger rebuild` that is killed at its worst moments, and repeated."""

import os
import signal
import subprocess
import sys

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import Arena
from tests.integration.test_journal import forget, lose_catalog, rebuild, rows_of, train_both

_KILLED = """
import os, signal, sys
from importlib import import_module
module, name, when = sys.argv[1:4]
owner = import_module(module)
*path, name = name.split(".")
for each in path:
    owner = getattr(owner, each)
work = getattr(owner, name)
def die(*given, **options):
    if when == "after":
        work(*given, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, die)
from dlac_pipeline.cli.main import app
app(["ledger", "rebuild", "--home", sys.argv[4]], standalone_mode=False)
"""
REBUILD = "dlac_pipeline.extensions.rebuild.rebuild"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "when"),
    [
        pytest.param("pyiceberg.catalog.sql", "SqlCatalog.commit_table", "before", id="before the commit"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.soak)
            for name, case in {
                "one other table": (REBUILD, "_restore", "after"),
                "metadata written": ("pyiceberg.serializers", "ToOutputFile.table_metadata", "after"),
                "an empty ledger": (REBUILD, "_make_again", "after"),
                "after the commit": ("pyiceberg.catalog.sql", "SqlCatalog.commit_table", "after"),
            }.items()
        ),
    ],
)
def test_killed_rebuild_is_repeated(arena: Arena, module: str, name: str, when: str) -> None:
    """The catalog was lost. After the kill, and a second rebuild, all tables equal the lost ones, and the run resumes."""
    spec = train_both(arena)
    before, uuid = rows_of(arena), Ledger(arena.lakehouse).table_uuid
    lose_catalog(arena)
    command = [sys.executable, "-c", _KILLED, module, name, when, str(arena.home)]
    assert subprocess.run(command, check=False, env=os.environ).returncode == -signal.SIGKILL
    assert not any(run.problem for run in rebuild(arena).runs)
    assert rows_of(arena) == before
    assert Ledger(arena.lakehouse).table_uuid == uuid
    assert min(arena.train(spec)) == 81
    forget(arena)
    assert audit_run(arena.lakehouse, "r").exact
