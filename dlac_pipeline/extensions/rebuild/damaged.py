"""Connection to a lakehouse whose tables of DLAC may be lost or damaged. They are left as they are."""

import json
from dataclasses import replace
from pathlib import Path

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import (
    Lakehouse,
    checked_config,
    open_catalog,
    opening,
    reachable,
    read_places,
)
from dlac_pipeline.lakehouse.iceberg.relocation import Relocation, find_relocation, raw_path


def connect_damaged(config: LakehouseConfig) -> Lakehouse:
    """Open the catalog of a damaged lakehouse. Raises as `connect` for a catalog that does not answer, or is not configured."""
    named, config = config, checked_config(config)
    relocation, recorded = Relocation(), read_places(config)
    if recorded is not None:
        metadata = recorded.ledger_metadata or _lost_metadata(config)
        relocation = find_relocation(config, replace(recorded, ledger_metadata=metadata))
    with reachable(config.uri):
        with opening(config.uri):
            lakehouse = Lakehouse(config, open_catalog(config, relocation, create=True), relocation, named=named)
        lakehouse.create_namespace(config.namespace)
        lakehouse.record_place()
    return lakehouse


def _lost_metadata(config: LakehouseConfig) -> str | None:
    """Return the location of a metadata file of the ledger as it was recorded, for a catalog that lost it.

    The metadata files of any own table in the warehouse record where it was made. None: there is none.
    """
    warehouse = raw_path(config.warehouse) if config.warehouse else None
    if warehouse is None:
        return None
    for name in (config.namespace, f"{config.namespace}.db"):
        for path in sorted((Path(warehouse) / name).glob("*/metadata/*.metadata.json"), reverse=True):
            try:
                location = raw_path(json.loads(path.read_bytes())["location"])
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue
            if location is not None and location.endswith(f"/{name}/{path.parents[1].name}"):
                return f"file://{Path(location).parent}/consumption/metadata/{path.name}"
    return None
