"""A lakehouse's settings, as a job spec has them: `LakehouseConfig`. Without pyiceberg, so that a job spec is read at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_LIBPQ = ("postgresql", "postgresql+psycopg2", "postgresql+psycopg")
_LIBPQ_TIMEOUTS = {
    "connect_timeout": "10",
    "tcp_user_timeout": "20000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
}
"""A network that went silent is noticed within half a minute; the kernel by itself takes a quarter of an hour."""
KEEP_SNAPSHOTS = 20
"""Of each of DLAC's own tables, where nothing else is said."""


class LakehouseConfig(BaseModel):
    """Where the lakehouse is: its Iceberg catalog and the folder or bucket of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["sql", "rest"] = Field(
        default="sql", description="Kind of Iceberg catalog: sql (SQLite, PostgreSQL) or rest."
    )
    uri: str = Field(
        default="",
        description="Address of the catalog; empty: an SQLite file in the home folder ($DLAC_HOME, else .dlac).",
    )
    warehouse: str = Field(
        default="", description="Folder or bucket of the tables; empty: a folder in the home folder."
    )
    name: str = Field(default="dlac", description="Name of the catalog, as pyiceberg and SQL engines see it.")
    namespace: str = Field(default="dlac", description="Namespace of DLAC's own tables (plans, consumption, ...).")
    properties: dict[str, str] = Field(
        default_factory=dict, description="Further pyiceberg properties, such as s3.endpoint or credentials."
    )

    def at_home(self, home: Path) -> LakehouseConfig:
        """This configuration with the empty settings filled in by the embedded lakehouse in `home`."""
        return self.model_copy(
            update={
                "uri": self.uri or f"sqlite:///{home.resolve()}/catalog.db",
                "warehouse": self.warehouse or f"file://{home.resolve()}/warehouse",
            }
        )

    @property
    def address(self) -> str:
        """The catalog's address for messages, which go to logs and to Dagster."""
        return without_password(self.uri)

    def catalog_properties(self) -> dict[str, str]:
        """The properties that pyiceberg is given."""
        uri = _with_timeouts(self.uri)
        local = {"py-io-impl": "catalog.durable_io.DurableFileIO"} if self.warehouse.startswith(("file:", "/")) else {}
        return {"uri": uri, "warehouse": self.warehouse, **local, **self.properties}


def without_password(uri: str) -> str:
    """An address with *** for each password or token in it."""
    before_host = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", uri)
    return re.sub(r"([?&]\w*(?:password|secret|token)\w*=)[^&#]*", r"\1***", before_host, flags=re.IGNORECASE)


def _with_timeouts(uri: str) -> str:
    """An address whose connections end when nobody answers any more; what it says itself of that stands."""
    dialect = uri.partition(":")[0]
    if dialect == "sqlite":
        wanted = {"timeout": "30"}
    elif dialect in _LIBPQ:
        wanted = _LIBPQ_TIMEOUTS
    else:
        return uri
    query = "&".join(f"{name}={value}" for name, value in wanted.items() if f"{name}=" not in uri)
    return uri + (("&" if "?" in uri else "?") + query if query else "")
