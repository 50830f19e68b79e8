"""Connections to catalogs that are silent, unavailable or refused, over real sockets."""

import socket
from typing import Literal

import pytest

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured, CatalogUnreachable, DlacError, LakehouseError
from dlac_pipeline.lakehouse.iceberg import safe_commit
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.train import startup
from tests.failing_servers import serve_status
from tests.ports import own_port
from tests.small_records import small_spec


def test_silent_rest_catalog_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog has accepted the connection and never answers."""
    monkeypatch.setattr(safe_commit, "REST_TIMEOUT_S", (1.0, 0.5))
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CatalogUnreachable, match="timed out"):
        connect(LakehouseConfig(type="rest", uri=f"http://127.0.0.1:{silent.getsockname()[1]}"))


@pytest.mark.parametrize("kind", ["sql", "rest"])
def test_catalog_errors_have_no_password(kind: Literal["sql", "rest"]) -> None:
    """The messages of SQLAlchemy and HTTP about an unavailable catalog have no password."""
    scheme = {"sql": "postgresql+psycopg2", "rest": "http"}[kind]
    with pytest.raises(LakehouseError, match=r"me:\*\*\*@") as caught:
        connect(LakehouseConfig(type=kind, uri=f"{scheme}://me:s3cr3t@127.0.0.1:{own_port()}/lake"))
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, CatalogMisconfigured), (403, CatalogMisconfigured), (404, CatalogMisconfigured), (503, CatalogUnreachable)],
)
def test_rest_refusal_differs_from_outage(status: int, kind: type[Exception]) -> None:
    """Refused credentials do not recover, so nothing is retried."""
    with serve_status(status) as uri, pytest.raises(DlacError) as caught:
        connect(LakehouseConfig(type="rest", uri=uri))
    assert type(caught.value) is kind


@pytest.mark.parametrize("status", [404, 405])
def test_failover_of_rest_is_outage(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor of a rank has opened this catalog before. A refused password is no outage."""
    monkeypatch.setattr(startup, "RETRY_WITHIN_S", 0.0)
    for code, kind in {status: CatalogUnreachable, 401: CatalogMisconfigured}.items():
        with serve_status(code) as uri, pytest.raises(DlacError) as caught:
            startup.open_plans(small_spec(lakehouse={"type": "rest", "uri": uri, "warehouse": "/x"}), supervised=True)
        assert type(caught.value) is kind
