"""The metadata files in a folder of the warehouse."""

import re

from pyarrow.fs import FileSelector, FileSystem
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from dlac_pipeline.lakehouse.errors import LakehouseError

METADATA = ".metadata.json"
JOURNAL = "journal"
"""Folder in the data folder of the ledger, with files that no metadata names and nothing removes: `ledger/journal.py`."""
_VERSION = re.compile(r"v?(\d+)(?:-[^/]*)?\.metadata\.json$")


def version_of(location: str) -> int:
    """Return the number in the name of a metadata file, or -1 for a name without one."""
    found = _VERSION.match(location.rsplit("/", 1)[-1])
    return int(found[1]) if found else -1


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
