"""A lakehouse in a real Iceberg REST catalog, with its warehouse and its checkpoints in a real S3 store."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import Arena
from tests.seaweedfs import SeaweedFS, needs_seaweedfs, seaweedfs

pytestmark = needs_seaweedfs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """Catalog and store of this module's tests."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture
def served(server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """A lakehouse in the catalog, without files on this node."""
    (tmp_path / "home").mkdir()
    made = Arena(tmp_path / "home", monkeypatch, server.lakehouse("dlac"))
    yield made
    made.close()
    for name in made.lakehouse.catalog.list_tables("src") + made.lakehouse.catalog.list_tables("dlac"):
        made.lakehouse.catalog.drop_table(name)


def test_run_resumes_on_rest_catalog(served: Arena, server: SeaweedFS) -> None:
    """Each step runs on the servers alone: plan, pin, training, resume without local files, audit and upkeep."""
    served.table()
    spec = served.spec(
        "rested", world_size=1, passes=1, store="s3://store/checkpoints", store_properties=server.properties
    )
    before = served.train(spec, until=25)
    shutil.rmtree(spec.checkpoint.local)
    after = served.train(spec)
    repeated = before.keys() & after.keys()
    assert repeated == {21, 22, 23, 24}
    assert all(before[step] == after[step] for step in repeated)
    assert audit_run(served.lakehouse, "rested").exact
    run_upkeep(served.lakehouse)
    assert audit_run(served.lakehouse, "rested").exact


def test_rest_outage_is_awaited(served: Arena, server: SeaweedFS) -> None:
    """The server is killed and started again. An append is repeated until it answers."""
    served.table()
    served.train(served.spec("waits", world_size=1, passes=1), until=15)
    ledger = Ledger(served.lakehouse)
    server.kill()
    restart = threading.Timer(2.0, server.start)
    restart.start()
    name_checkpoint(ledger, "waits", "kept")
    restart.join()
    assert [row.kind for row in ledger.rows("waits")][-1] == "name"
