"""Empty lakehouses of tests equal the library's."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from tests.empty_lakehouse import make_empty_lakehouse

_IDS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def content_of(home: Path) -> list[str]:
    """Return all that a lakehouse holds, without its ids, its times and the place of its home."""
    with closing(sqlite3.connect(home / "catalog.db")) as catalog:
        content = [str(catalog.execute("PRAGMA journal_mode").fetchone()), *catalog.iterdump()]
    for path in sorted(home.rglob("*")):
        content.append(f"{path} {oct(path.stat().st_mode)}")
        if path.suffix == ".json":
            content.append(json.dumps({**json.loads(path.read_text()), "last-updated-ms": 0}, ensure_ascii=False))
    return sorted(_IDS.sub("ID", line.replace(str(home), "HOME")) for line in content)


def uuids_of(home: Path) -> set[str]:
    """Return the ids of the tables."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    return {str(lakehouse.own(name).metadata.table_uuid) for name in ("consumption", "plans", "slices")}


def test_copied_lakehouse_is_as_made(tmp_path: Path) -> None:
    """Files, catalog and metadata equal the result of `connect`. Only the ids of tables differ."""
    made, *copied = (tmp_path / name / "home é" for name in ("made", "first", "second"))
    connect(LakehouseConfig().at_home(made)).create_namespace("src")
    for home in copied:
        make_empty_lakehouse(home)
        assert content_of(home) == content_of(made)
    assert len(set.union(*(uuids_of(home) for home in (made, *copied)))) == 9
