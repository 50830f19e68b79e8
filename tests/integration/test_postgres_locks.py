"""A PostgreSQL catalog whose rows are locked: by a client that is frozen in the middle of its commit, or by anybody for good."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import Connection, Engine, create_engine, event, text

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CommitOutcomeUnknown
from dlac_pipeline.lakehouse.iceberg import safe_commit
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.postgres_server import needs_postgres, postgres

pytestmark = needs_postgres
SETTINGS = ("idle_in_transaction_session_timeout", "lock_timeout")
ENOUGH_S = 120.0
"""Seconds until a wait ends, so that a test with a defect fails instead of waiting forever."""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[LakehouseConfig]:
    """A lakehouse with its catalog in PostgreSQL."""
    with postgres() as address:
        yield LakehouseConfig(uri=address).at_home(tmp_path / "home")


def engine_of(lakehouse: Lakehouse) -> Engine:
    """What its catalog talks to the server with."""
    assert isinstance(lakehouse.catalog, SqlCatalog)
    return lakehouse.catalog.engine


def test_frozen_committer_blocks_no_other(config: LakehouseConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If others commit between UPDATE and COMMIT, an append learns that it did not land, and commits again."""
    frozen, other = Ledger(connect(config)), Ledger(connect(config))
    monkeypatch.setattr(safe_commit, "POSTGRES_TIMEOUTS", dict(zip(SETTINGS, ("1s", "300ms"), strict=True)))
    claim(frozen, "r", nonce="n1", replaces=0)
    stands, landed, in_time = threading.Event(), threading.Event(), []

    def freeze(connection: Connection) -> None:
        if not stands.is_set():
            stands.set()
            in_time.append(landed.wait(ENOUGH_S))

    event.listen(engine_of(frozen.lakehouse), "commit", freeze)
    rows = [CheckpointRow(checkpoint_id="a")]
    attempt = Attempt(run="r", number=1, nonce="n1")
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit_checkpoint, frozen, attempt, checkpoint_id="a", parent=None, rows=rows)
        assert stands.wait(ENOUGH_S)
        claim(other, "another", nonce="x", replaces=0)
        landed.set()
        assert committing.result().fence.head == "a"
    assert in_time == [True], "the others waited for who is frozen"
    assert [row.kind for row in other.rows("r")] == ["claim", "checkpoint"]
    assert [row.kind for row in other.rows("another")] == ["claim"]


@pytest.mark.slow
def test_locked_row_is_not_awaited_forever(config: LakehouseConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its deadline an append reports that the catalog does not answer, and the reason."""
    monkeypatch.setitem(safe_commit.POSTGRES_TIMEOUTS, "lock_timeout", "300ms")
    ledger = Ledger(connect(config), deadline_s=1.0)
    with create_engine(config.uri).begin() as connection:
        connection.execute(text("UPDATE iceberg_tables SET metadata_location = metadata_location"))
        letting_go = threading.Timer(ENOUGH_S, connection.rollback)
        letting_go.start()
        with pytest.raises(CommitOutcomeUnknown, match="lock timeout"):
            claim(ledger, "r", nonce="n1", replaces=0)
        letting_go.cancel()
