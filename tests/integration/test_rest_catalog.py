"""The lakehouse behind a REST catalog: training, contention, an answer that is lost, a catalog that is away for a while."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import SteppedAside
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import claim, name_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.maintenance.upkeep import run_upkeep
from tests.conftest import PROGRAMS, Arena, wait_until
from tests.ports import own_port


class RestCatalog:
    """A server process, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = own_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """And wait until it answers."""
        command = [sys.executable, str(PROGRAMS / "rest_catalog.py"), str(self._port), str(self.folder)]
        self._process = subprocess.Popen(command)
        wait_until(self._answers, what="the catalog")

    def kill(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()

    def drop_answer(self) -> None:
        """Let the next request that changes something land, and its client never hear of it."""
        (self.folder / "drop-answer").touch()

    def _answers(self) -> bool:
        with suppress(requests.RequestException):  # it listens before it can answer
            return requests.get(f"{self.url}/v1/config", timeout=5).ok
        return False


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[RestCatalog]:
    """A running one."""
    (folder := tmp_path / "served").mkdir()
    made = RestCatalog(folder)
    yield made
    made.kill()


@pytest.fixture
def served(rest: RestCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """A lakehouse behind it."""
    (tmp_path / "home").mkdir()
    made = Arena(tmp_path / "home", monkeypatch, LakehouseConfig(type="rest", uri=rest.url))
    yield made
    made.close()


def test_run_resumes_on_rest_catalog(served: Arena) -> None:
    """Planned, pinned, trained, resumed, audited, tidied up; the ledger names what was trained on."""
    served.table()
    spec = served.spec("rested", world_size=1, passes=1)
    before = served.train(spec, until=25)
    behind = served.train(spec)
    repeated = before.keys() & behind.keys()
    assert repeated == {21, 22, 23, 24}
    assert all(before[step] == behind[step] for step in repeated)
    assert audit_run(served.lakehouse, "rested").exact
    run_upkeep(served.lakehouse)
    assert audit_run(served.lakehouse, "rested").exact


@pytest.mark.soak
def test_rest_claims_race_safely(served: Arena) -> None:
    """One wins, the others step aside; claims of other runs beside it all land."""
    config = served.lakehouse.config

    def claims(number: int) -> bool:
        ledger = Ledger(connect(config))
        claim(ledger, f"own-{number}", nonce="n", replaces=0, detail={})
        try:
            claim(ledger, "wanted", nonce=f"n{number}", replaces=0, detail={})
        except SteppedAside:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(claims, range(4)))
    assert won.count(True) == 1
    ledger = Ledger(served.lakehouse)
    assert ledger.runs() == ["own-0", "own-1", "own-2", "own-3", "wanted"]
    assert len(ledger.rows("wanted")) == 1


def test_lost_rest_answer_is_resolved(served: Arena, rest: RestCatalog) -> None:
    """The commit has landed: it is found, and not made twice."""
    ledger = Ledger(served.lakehouse)
    rest.drop_answer()
    assert claim(ledger, "r", nonce="n", replaces=0, detail={}).fence.seq == 1
    assert not (rest.folder / "drop-answer").exists()
    assert [row.kind for row in ledger.rows("r")] == ["claim"]


@pytest.mark.soak
def test_rest_outage_is_awaited(served: Arena, rest: RestCatalog) -> None:
    """An append is repeated until it is back."""
    served.table()
    served.train(served.spec("waits", world_size=1, passes=1), until=15)
    ledger = Ledger(served.lakehouse)
    rest.kill()
    back = threading.Timer(2.0, rest.start)
    back.start()
    name_checkpoint(ledger, "waits", "kept")
    back.join()
    assert [row.kind for row in ledger.rows("waits")][-1] == "name"
