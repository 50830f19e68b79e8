"""Translation of places of an embedded lakehouse that was moved: `Relocation`. See docs/design/0018-stores.md."""

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from dlac_pipeline.lakehouse.config import LakehouseConfig, sqlite_file
from dlac_pipeline.lakehouse.errors import LakehouseError
from dlac_pipeline.lakehouse.iceberg.sqlite_locks import ReportingConnection, lock_timeout_s

PROPERTY = "dlac.relocation"
"""Property of the catalog, given to its file I/O: where the folders of a moved lakehouse are."""
MADE_AT = "dlac.catalog-file"
"""Property of DLAC's namespace: the catalog's file when it was made."""
_METADATA = (
    "SELECT metadata_location FROM iceberg_tables "
    "WHERE catalog_name = ? AND table_namespace = ? AND table_name = 'consumption'"
)
_MADE_AT = (
    "SELECT property_value FROM iceberg_namespace_properties "
    "WHERE catalog_name = ? AND namespace = ? AND property_key = ?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocation:
    """The folders of a lakehouse that was moved or copied, as recorded and as they are now. Empty: it did not move."""

    moves: tuple[tuple[str, str], ...] = ()
    """(folder as recorded, folder now). Deeper folders come first."""

    def here(self, path: str) -> str:
        """Return where a recorded path is now."""
        return _replace_folder(path, self.moves)

    def to_recorded(self, path: str) -> str:
        """Return how the path of something in this lakehouse is recorded."""
        return _replace_folder(path, tuple((now, before) for before, now in self.moves))

    def uri_here(self, uri: str) -> str:
        """Return the present place of the file at a recorded `file://` address. Other addresses stay."""
        return self._uri(uri, self.moves)

    def to_recorded_uri(self, uri: str) -> str:
        """Return the recorded form of a `file://` address in this lakehouse. Other addresses stay."""
        return self._uri(uri, tuple((now, before) for before, now in self.moves))

    def properties(self) -> dict[str, str]:
        """Return the catalog property that informs its file I/O."""
        return {PROPERTY: json.dumps(self.moves)} if self.moves else {}

    @staticmethod
    def of_properties(properties: Mapping[str, str]) -> "Relocation":
        """Return the relocation that `properties` records."""
        moves = json.loads(properties.get(PROPERTY) or "[]")
        return Relocation(moves=tuple((before, now) for before, now in moves))

    @staticmethod
    def _uri(uri: str, moves: tuple[tuple[str, str], ...]) -> str:
        if not moves or not uri.startswith("file:"):
            return uri
        return "file://" + quote(_replace_folder(unquote(urlsplit(uri).path), moves))


def raw_path(location: str) -> str | None:
    """Return the path of a local location as Iceberg records it, without escapes, or None for one of an object store."""
    if location.startswith("file:"):
        path = location.removeprefix("file:")
        return path.removeprefix("//") if path.startswith("///") else path
    return location if location.startswith("/") else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Places of a lakehouse that an SQLite catalog records."""

    ledger_metadata: str | None = None
    """Location of the ledger's metadata. None: the catalog has no lakehouse of DLAC's."""
    catalog_file: str | None = None
    """The catalog's file when it was made. None: the catalog may only be read."""


def read_recorded(file: Path, config: LakehouseConfig) -> Recorded:
    """Read the records of the catalog in `file`. Wait while it is locked. Raises `sqlite3.Error` for one that is damaged."""
    if not file.is_file() or file.stat().st_size == 0:
        return Recorded()
    # Writable, though nothing is written: after a power cut SQLite must first roll an unfinished commit back.
    address, timeout_s = f"file:{quote(str(file))}?mode=rw", lock_timeout_s(config.uri)
    with closing(ReportingConnection(address, uri=True, file=file, timeout=timeout_s)) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"iceberg_tables", "iceberg_namespace_properties"} <= names:
            return Recorded()
        key = (config.catalog_name, config.namespace)
        (metadata,) = connection.execute(_METADATA, key).fetchone() or (None,)
        (made_at,) = connection.execute(_MADE_AT, (*key, MADE_AT)).fetchone() or (None,)
    return Recorded(ledger_metadata=metadata, catalog_file=made_at)


def find_relocation(config: LakehouseConfig, recorded: Recorded) -> Relocation:
    """Return where the folders of an embedded lakehouse are now. Raises `LakehouseError` if its catalog was copied alone."""
    file, metadata = sqlite_file(config.uri), recorded.ledger_metadata
    path = None if metadata is None else raw_path(metadata)
    warehouse = raw_path(config.warehouse) if config.warehouse else None
    if file is None or path is None or warehouse is None:
        return Relocation()
    below = re.search(rf"/{re.escape(config.namespace)}(\.db)?/consumption/metadata/[^/]+$", path)
    if below is None:
        return Relocation()
    before, file = path[: below.start()], file.resolve()
    made_at = Path(recorded.catalog_file or file)
    current = Path(f"{warehouse}{below.group()}")
    # the catalog may be an older backup
    found_here = current.exists() or (current.parent.is_dir() and not Path(path).exists())
    moves = [] if made_at.parent == file.parent else [(str(made_at.parent), str(file.parent))]
    if before != warehouse and found_here:
        moves.append((before, warehouse))
    elif found_here and not Path(_replace_folder(path, tuple(moves))).parent.is_dir():
        moves = [(before, warehouse)]  # the catalog's file alone was moved
    relocation = Relocation(moves=tuple(sorted(set(moves), key=lambda move: len(move[0]), reverse=True)))
    if not moves:
        return relocation
    now = relocation.here(path)
    if now != path and not Path(now).parent.is_dir():
        raise LakehouseError(
            f"expected the tables of the catalog {str(file)!r}, which was made as {str(made_at)!r}, in "
            f"{str(Path(now).parent)!r}, found no such folder: move or copy the whole folder of the lakehouse, or name "
            "the folder of its tables with lakehouse.warehouse"
        )
    if now == path and made_at != file and made_at.exists() and not made_at.samefile(file):
        raise LakehouseError(
            f"expected the tables of the catalog {str(file)!r} beside it, found that it is a copy of {str(made_at)!r}, whose "
            f"tables in {before!r} both would write: copy that folder as well, and name the copy with lakehouse.warehouse"
        )
    return relocation


def _replace_folder(path: str, moves: tuple[tuple[str, str], ...]) -> str:
    for before, now in moves:
        if path == before or path.startswith(f"{before.rstrip('/')}/"):
            return now.rstrip("/") + path[len(before.rstrip("/")) :]
    return path
