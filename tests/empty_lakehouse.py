"""Empty lakehouses for tests: the first of a process is made as a user's is, all later ones are copies with new ids."""

import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from uuid import uuid4

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect

_CATALOG = "catalog.db"
_MOVED = {
    "iceberg_tables": ("metadata_location", "previous_metadata_location"),
    "iceberg_namespace_properties": ("property_value",),
}
"""Columns of the catalog that hold places."""


def empty_lakehouse(home: Path) -> Lakehouse:
    """Make and open an embedded lakehouse with the namespace `src`, in a folder that has none."""
    make_empty_lakehouse(home)
    return connect(LakehouseConfig().at_home(home))


def make_empty_lakehouse(home: Path) -> None:
    """Make an embedded lakehouse without runs in a folder that has none."""
    template, files = _template()
    for name in files.keys() - {_CATALOG}:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_moved_metadata(files[name].decode(), template, str(home)))
    # The catalog comes last and in one piece, for a process may be waiting for it.
    (home / "catalog.new").write_bytes(_moved_catalog(files[_CATALOG], template, str(home)))
    (home / "catalog.new").rename(home / _CATALOG)


def _moved_catalog(content: bytes, template: str, home: str) -> bytes:
    """Return a catalog of a lakehouse in another home."""
    with closing(sqlite3.connect(":memory:")) as catalog:
        catalog.deserialize(content)
        for table, columns in _MOVED.items():
            for column in columns:
                catalog.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (template, home))
        catalog.commit()
        return catalog.serialize()


def _moved_metadata(content: str, template: str, home: str) -> str:
    """Return a table's metadata in another home, as another table's metadata."""
    known = content.partition('"table-uuid":"')[2].partition('"')[0]
    return content.replace(template, home).replace(known, str(uuid4()))


@cache
def _template() -> tuple[str, Mapping[str, bytes]]:
    """Make a lakehouse, once in this process. Returns the folder that it was made in, and its files."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve() / "home"
        connect(LakehouseConfig().at_home(home)).create_namespace("src")
        files = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}
        return str(home), files
