"""Connections to catalogs: their addresses, timeouts, outages and locks."""

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured, CatalogUnreachable, DlacError, LakehouseError
from dlac_pipeline.lakehouse.iceberg import sqlite_locks
from dlac_pipeline.lakehouse.iceberg.connect import connect, reachable
from dlac_pipeline.lakehouse.outages import is_misconfigured


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("sqlite:////a/catalog.db", "sqlite:////a/catalog.db?timeout=30"),
        ("sqlite:////a/catalog.db?timeout=5", "sqlite:////a/catalog.db?timeout=5"),
        ("https://rest.example/catalog", "https://rest.example/catalog"),
    ],
)
def test_embedded_catalog_waits_for_lock(uri: str, found: str) -> None:
    """A timeout in the address stays, and so does the address of another kind of catalog."""
    assert LakehouseConfig(uri=uri).catalog_properties()["uri"] == found


def test_unanswered_postgresql_connection_ends() -> None:
    """The kernel's own timeout is a quarter of an hour. A timeout in the address stays."""
    uri = LakehouseConfig(uri="postgresql+psycopg2://me@db/lake?connect_timeout=3").catalog_properties()["uri"]
    settings = dict(pair.split("=") for pair in uri.partition("?")[2].split("&"))
    assert settings["connect_timeout"] == "3"
    assert int(settings["tcp_user_timeout"]) <= 30_000
    assert int(settings["keepalives_idle"]) + 2 * int(settings["keepalives_interval"]) <= 30


@pytest.mark.parametrize(("answered", "kind"), [(True, CatalogUnreachable), (False, CatalogMisconfigured)])
def test_unopened_file_is_outage(answered: bool, kind: type[Exception], tmp_path: Path) -> None:
    """SQLite cannot open a file whose journal is a folder, nor a file on an absent mount."""
    config = LakehouseConfig().at_home(tmp_path)
    connect(config)
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    (tmp_path / "catalog.db-wal").mkdir()
    with pytest.raises(DlacError, match="unable to open database file") as caught:
        connect(config, answered=answered)
    assert type(caught.value) is kind


def test_refused_node_is_outage_later() -> None:
    """The standby that a failover promotes may not list the nodes at first."""
    refused = OperationalError("", None, Exception('FATAL: no pg_hba.conf entry for host "10.0.0.1"'))
    assert is_misconfigured(refused)
    assert not is_misconfigured(refused, answered=True)
    wrong = OperationalError("", None, Exception('FATAL: password authentication failed for user "me"'))
    assert is_misconfigured(wrong, answered=True)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), CatalogUnreachable),
        (OSError(errno.ENOSPC, "No space left on device"), LakehouseError),
        (OSError("AWS Error ACCESS_DENIED during PutObject operation"), LakehouseError),
        (FileNotFoundError(errno.ENOENT, "No such file"), FileNotFoundError),
    ],
)
def test_passing_warehouse_failure_is_awaited(failure: OSError, kind: type[Exception]) -> None:
    """A full or forbidden warehouse is no outage, nor is a missing file, which upkeep may have removed."""
    with pytest.raises((LakehouseError, OSError)) as caught, reachable("sqlite:///catalog.db"):
        raise failure
    assert type(caught.value) is kind


@pytest.fixture
def reporting_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite_locks.ReportingConnection]:
    """Open a connection that reports a wait after 0.2 s."""
    monkeypatch.setattr(sqlite_locks, "REPORT_AFTER_S", 0.2)
    file = tmp_path / "catalog.db"
    with closing(sqlite_locks.ReportingConnection(str(file), file=file, timeout=5.0)) as connection:
        connection.execute("CREATE TABLE t (a)")
        yield connection


@pytest.mark.parametrize(
    ("held", "statement"),
    [
        (("BEGIN EXCLUSIVE",), "SELECT * FROM t"),
        (("BEGIN IMMEDIATE",), "INSERT INTO t VALUES (1)"),
        (("BEGIN", "SELECT * FROM t"), "INSERT INTO t VALUES (1)"),
    ],
    ids=["read", "write", "commit"],
)
def test_lock_wait_is_reported(
    reporting_connection: sqlite_locks.ReportingConnection,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    held: tuple[str, ...],
    statement: str,
) -> None:
    """Each statement that can wait reports the wait once, and succeeds when the lock is released."""
    other = sqlite3.connect(tmp_path / "catalog.db", isolation_level=None, check_same_thread=False)
    for each in held:  # in this process, as in another one
        other.execute(each).fetchall()
    release = threading.Timer(0.6, other.close)
    release.start()
    reporting_connection.cursor().execute(statement)
    reporting_connection.commit()
    release.join()
    assert len(caplog.messages) == 1
    assert "found it locked for 0 s; waiting for at most 5 s" in caplog.text
