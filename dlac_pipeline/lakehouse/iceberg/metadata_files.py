"""The files of an own table as the warehouse has them, also metadata files that the catalog does not name (design note 0013)."""

import json
import re
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import LakehouseError

METADATA = ".metadata.json"
_VERSION = re.compile(r"v?(\d+)(?:-[^/]*)?\.metadata\.json$")


def version_of(location: str) -> int:
    """Return the number in the name of a metadata file, or -1 for a name without one."""
    found = _VERSION.match(location.rsplit("/", 1)[-1])
    return int(found[1]) if found else -1


class TableFolder:
    """The data and metadata folders of a table, and the paths of files in them as the filesystem spells them."""

    def __init__(self, table: Table) -> None:
        """Raises `LakehouseError` for a warehouse whose files cannot be listed."""
        places = table.location_provider()
        self.location = places.metadata_path
        """Address of the metadata folder."""
        if not isinstance(table.io, PyArrowFileIO):
            raise LakehouseError(
                f"expected a warehouse that pyarrow reads, found {type(table.io).__name__}: its files cannot be listed"
            )
        self._io = table.io
        self._filesystem, self._metadata_path = _resolve(self._io, places.metadata_path)
        self.folders = [self.path(places.data_path), self._metadata_path]

    def files(self) -> dict[str, FileInfo]:
        """Return path -> file of everything in both folders."""
        return {info.path: info for folder in self.folders for info in self._listed(folder, recursive=True)}

    def metadata_paths(self) -> list[str]:
        """Return the paths of all metadata files, the newest version first."""
        listed = self._listed(self._metadata_path, recursive=False)
        found = [info.path for info in listed if info.path.endswith(METADATA)]
        return sorted(found, key=version_of, reverse=True)

    def unnamed_metadata(self, table: Table) -> list[str]:
        """Return the paths of metadata files that the table does not name, the newest version first."""
        log = (entry.metadata_file for entry in table.metadata.metadata_log)
        named = {self.path(location) for location in (table.metadata_location, *log)}
        return [path for path in self.metadata_paths() if path not in named]

    def metadata(self, path: str) -> dict[str, Any]:
        """Return the content of a metadata file. Empty if it is gone (each commit removes the oldest) or no JSON object."""
        try:
            with self._filesystem.open_input_stream(path) as stream:
                found = json.loads(stream.read())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        except UnicodeDecodeError as err:
            raise LakehouseError(
                f"expected a table's metadata as JSON in {path!r}, found something else ({err}): nothing was deleted; move it"
            ) from err
        return found if isinstance(found, dict) else {}

    def location_of(self, path: str) -> str:
        """Return the address of a metadata file."""
        return f"{self.location}/{path.rsplit('/', 1)[-1]}"

    def delete(self, path: str) -> bool:
        """Delete a file, unless another process was faster."""
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError:
            return False
        return True

    def path(self, location: str) -> str:
        """Return the path of an address."""
        return self._io.parse_location(location, self._io.properties)[2]

    def _listed(self, folder: str, *, recursive: bool) -> list[FileInfo]:
        selector = FileSelector(folder, allow_not_found=True, recursive=recursive)
        return [info for info in self._filesystem.get_file_info(selector) if info.type == FileType.File]


def newest_metadata(missing: str, properties: dict[str, str]) -> str | None:
    """Return the newest metadata file in the folder of a missing one, or None if the folder has no newer one."""
    io = load_file_io(properties, missing)
    if not isinstance(io, PyArrowFileIO):
        return None
    folder = missing.rsplit("/", 1)[0]
    filesystem, path = _resolve(io, folder)
    listed = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    newest = max((info.base_name for info in listed), key=version_of, default="")
    return f"{folder}/{newest}" if version_of(newest) > version_of(missing) else None


def _resolve(io: PyArrowFileIO, address: str) -> tuple[FileSystem, str]:
    scheme, netloc, path = io.parse_location(address, io.properties)
    return io.fs_by_scheme(scheme, netloc), path
