"""Names of source tables of other formats than Iceberg, such as "delta:/data/events": in specs, plans, legs and audits.

The location begins with a slash or has a scheme, by which it differs from a table of a catalog that is named "delta".
"""

import re
from pathlib import Path

from blake3 import blake3

from dlac_pipeline.lakehouse.doors import Door

ICEBERG = "iceberg"
SOURCES = Door("dlac.sources", "source format")
"""Formats of source tables beside Iceberg, each a `SourceFormat` of `dlac_pipeline.lakehouse.iceberg.sources`."""


def external_identifier(table_format: str, location: str) -> str:
    """Return the identifier of a table. A path is taken from the working directory. An identifier stays as it is."""
    location = location.removeprefix(f"{table_format}:").removeprefix("file://")
    if "://" not in location:
        location = f"/{str(Path(location).expanduser().resolve()).lstrip('/')}"
    return f"{table_format}:{location.rstrip('/')}"


def split_identifier(identifier: str) -> tuple[str, str] | None:
    """Return format and location of an identifier, or None for a table of a catalog."""
    table_format, _, location = identifier.partition(":")
    is_path = location.startswith("/") and not location.startswith("//")  # s3://bucket names no format
    return (table_format, location) if is_path or "://" in location else None


def mirror_name(identifier: str, namespace: str) -> str:
    """Return the name of the mirror of a table, in the catalog whose ledger has this namespace."""
    digest = blake3(identifier.encode()).hexdigest(length=8)
    table_format = re.sub(r"\W", "_", identifier.partition(":")[0])
    return f"{namespace}_external.{table_format}_{digest}"
