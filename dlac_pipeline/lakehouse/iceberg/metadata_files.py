"""The files of an own table as the warehouse has them, and the metadata files in a folder."""

import json
import re
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import LakehouseError

METADATA = ".metadata.json"
JOURNAL = "journal"
"""Folder in the data folder of the ledger, with files that no metadata names and nothing removes: `ledger/journal.py`."""
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
        self._io = table.io
        self._filesystem, metadata_path = resolve(self._io, places.metadata_path)
        self.folders = [self.path(places.data_path), metadata_path]

    def files(self) -> dict[str, FileInfo]:
        """Return path -> file of everything in both folders, without the journal."""
        selectors = (FileSelector(folder, allow_not_found=True, recursive=True) for folder in self.folders)
        listed = (info for selector in selectors for info in self._filesystem.get_file_info(selector))
        kept = f"{self.folders[0]}/{JOURNAL}/"
        return {info.path: info for info in listed if info.type == FileType.File and not info.path.startswith(kept)}

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

    def delete(self, path: str) -> bool:
        """Delete a file, unless another process was faster."""
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError:
            return False
        return True

    def path(self, location: str) -> str:
        """Return the path of an address."""
        return resolve(self._io, location)[1]


def metadata_files(io: FileIO, folder: str) -> list[str]:
    """Return the addresses of the metadata files in a folder, the newest version first. Raises as `resolve`."""
    filesystem, path = resolve(io, folder)
    listed = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in listed if info.path.endswith(METADATA)]
    return [f"{folder}/{name}" for name in sorted(names, key=version_of, reverse=True)]


def resolve(io: FileIO, address: str) -> tuple[FileSystem, str]:
    """Return the file system of an address, and its path there. Raises `LakehouseError` if pyarrow does not read it."""
    if not isinstance(io, PyArrowFileIO):
        raise LakehouseError(
            f"expected a warehouse that pyarrow reads, found {type(io).__name__}: its files cannot be listed"
        )
    scheme, netloc, path = io.parse_location(address, io.properties)
    return io.fs_by_scheme(scheme, netloc), path
