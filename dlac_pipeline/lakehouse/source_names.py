"""Names of tables of other formats, such as "delta:/data/events", wherever DLAC names tables: in plans, legs and audits.

The location has a slash, by which it differs from a table of a catalog that is named "delta".
"""

from pathlib import Path

from blake3 import blake3

FORMATS = ("delta", "hudi")


def external_identifier(table_format: str, location: str) -> str:
    """Return the identifier of a table. A path is taken from the working directory. An identifier stays as it is."""
    location = location.removeprefix(f"{table_format}:").removeprefix("file://")
    if "://" not in location:
        location = str(Path(location).expanduser().resolve())
    return f"{table_format}:{location.rstrip('/')}"


def split_identifier(identifier: str) -> tuple[str, str] | None:
    """Return format and location of an identifier, or None for a table of a catalog."""
    table_format, _, location = identifier.partition(":")
    return (table_format, location) if table_format in FORMATS and "/" in location else None


def mirror_name(identifier: str, namespace: str) -> str:
    """Return the name of the mirror of a table, in the catalog whose ledger has this namespace."""
    digest = blake3(identifier.encode()).hexdigest(length=8)
    return f"{namespace}_external.{identifier.partition(':')[0]}_{digest}"
