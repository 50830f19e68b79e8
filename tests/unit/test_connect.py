"""The address that a catalog is opened with."""

from __future__ import annotations

import pytest

from catalog.lakehouse_config import LakehouseConfig


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("sqlite:////a/catalog.db", "sqlite:////a/catalog.db?timeout=30"),
        ("sqlite:////a/catalog.db?timeout=5", "sqlite:////a/catalog.db?timeout=5"),
        ("sqlite:////a/catalog.db?mode=rw", "sqlite:////a/catalog.db?mode=rw&timeout=30"),
        ("https://rest.example/catalog", "https://rest.example/catalog"),
    ],
)
def test_an_embedded_catalog_waits_for_its_lock(uri: str, found: str) -> None:
    """Unless the address says how long; that of another catalog stays as it is."""
    assert LakehouseConfig(uri=uri).catalog_properties()["uri"] == found


def test_a_connection_to_postgresql_ends_when_nobody_answers() -> None:
    """The kernel's own patience is a quarter of an hour; what the address says itself stands."""
    uri = LakehouseConfig(uri="postgresql+psycopg2://me@db/lake?connect_timeout=3").catalog_properties()["uri"]
    settings = dict(pair.split("=") for pair in uri.partition("?")[2].split("&"))
    assert settings["connect_timeout"] == "3"
    assert int(settings["tcp_user_timeout"]) <= 30_000
    assert int(settings["keepalives_idle"]) + 2 * int(settings["keepalives_interval"]) <= 30
