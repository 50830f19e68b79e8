"""A lakehouse's settings, as a job spec has them: `LakehouseConfig`. Without pyiceberg, so that a job spec is read at once."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_secrets, mask_setting, note_secrets
from dlac_pipeline.lakehouse.variables import similar_name, warn_of_variables

SCHEMES = ("s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "hdfs", "viewfs", "oss")
"""Schemes of object stores and of distributed file systems that a warehouse and a checkpoint store may have."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)")
_SCHEME_WITHOUT_COLON = re.compile(rf"({'|'.join(SCHEMES)})//", re.IGNORECASE)
_NO_HOST = ("file", "hdfs", "viewfs")
_HOME = ".dlac"
"""Name of the folder of an embedded lakehouse."""
_VARIABLES = ("DLAC_HOME",)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_LIBPQ = ("postgresql", "postgresql+psycopg2", "postgresql+psycopg")
_LIBPQ_TIMEOUTS = {
    "connect_timeout": "10",
    "tcp_user_timeout": "20000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
}
"""Timeouts that detect a silent network within half a minute. The kernel's own takes a quarter of an hour."""
CUSTOM_CATALOG = "py-catalog-impl"
"""PyIceberg's property that names the class of a catalog."""
KEEP_SNAPSHOTS = 20
"""Snapshots that are kept of each of DLAC's own tables, by default."""
MOST_SNAPSHOTS = 1_000_000


class LakehouseConfig(BaseModel):
    """Place of the lakehouse: its Iceberg catalog and the folder or bucket of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    type: Literal["", "sql", "rest", "hive", "glue", "dynamodb", "bigquery"] = ""
    """Kind of Iceberg catalog, as PyIceberg names it. Empty: the kind that the address shows."""
    uri: str = ""
    """Address of the catalog. Empty: the catalog that `name` or `type` means, or else an SQLite file in the home folder
    ($DLAC_HOME, or the nearest .dlac upwards)."""
    warehouse: str = ""
    """Folder or bucket of the tables. Empty: the catalog's warehouse, or a folder in the home folder."""
    name: str | None = None
    """Name of the catalog. Without a uri: in .pyiceberg.yaml or PYICEBERG_CATALOG__NAME__*. With a uri: the catalog's name
    for SQL engines, dlac if unset."""
    namespace: str = "dlac"
    """Namespace of DLAC's own tables (plans, consumption, ...)."""
    properties: dict[str, str] = Field(default_factory=dict)
    """Further pyiceberg properties, such as s3.endpoint or credentials."""

    @field_validator("name", "namespace")
    @classmethod
    def _is_filled(cls, name: str | None) -> str | None:
        if name is not None and (_CONTROL.search(name) or not all(part.strip() for part in name.split("."))):
            raise ValueError(f"expected a name such as 'dlac', found {name!r}: leave the setting out, or fill it in")
        return name

    @model_validator(mode="after")
    def _is_absolute(self) -> Self:
        """Spell folders in one way, absolute: each process of a run may have another working directory."""
        note_secrets({"uri": self.uri, **self.properties})
        if self.kind != "sql" or self.is_named:
            return self  # the server knows its warehouse
        uri, warehouse = self.uri, self.warehouse
        if warehouse:
            known = None if "py-io-impl" in self.properties else SCHEMES
            warehouse = checked_address(warehouse, known=known)
            warehouse = f"file://{warehouse}" if warehouse.startswith("/") else warehouse
        file = sqlite_file(uri)
        if file is not None and "uri=true" not in uri:
            uri = sqlite_uri(_absolute(str(file))) + uri[len(uri.split("?", maxsplit=1)[0]) :]
        object.__setattr__(self, "uri", uri)  # the model is frozen for everybody else
        object.__setattr__(self, "warehouse", warehouse)
        return self

    def at_home(self, home: str | Path) -> Self:
        """Return this configuration with its empty settings filled in by the embedded lakehouse in `home`.

        A catalog that `name` or `type` means is no embedded one, and stays as it is.

        Raises `SpecInvalid` if `home` is no folder.
        """
        folder = checked_home(Path(home))
        if self.is_named or self.kind != "sql":
            return self
        uri = self.uri or sqlite_uri(str(folder / "catalog.db"))
        return self.model_copy(update={"uri": uri, "warehouse": self.warehouse or f"file://{folder}/warehouse"})

    @property
    def kind(self) -> str:
        """The kind of the catalog: its type, "custom" for a py-catalog-impl, or else the kind that the address shows."""
        if CUSTOM_CATALOG in self.properties:
            return "custom"
        return self.type or {"http": "rest", "https": "rest", "thrift": "hive"}.get(self.uri.partition(":")[0], "sql")

    @property
    def catalog_name(self) -> str:
        """The catalog's name, as PyIceberg and SQL engines know it."""
        return self.name or "dlac"

    @property
    def is_named(self) -> bool:
        """True if PyIceberg's configuration has the catalog, under `name`."""
        return self.name is not None and not self.uri

    @property
    def address(self) -> str:
        """The catalog's address for messages, which go to logs and to Dagster."""
        return mask_secrets(self.uri) or f"{self.catalog_name} ({self.kind})"

    def catalog_properties(self) -> dict[str, str]:
        """The properties that pyiceberg is given."""
        # The tables of a REST catalog may be local files, whatever its warehouse is called.
        azure = any(name.startswith("adls.") for name in self.properties)
        durable = not azure if self.kind == "rest" else self.warehouse.startswith("file:")
        io = {"py-io-impl": "dlac_pipeline.lakehouse.iceberg.file_io.DurableFileIO"} if durable else {}
        places = {"uri": _with_timeouts(self.uri), "warehouse": self.warehouse}
        places = places if self.kind in ("sql", "rest") else {name: value for name, value in places.items() if value}
        return {**places, **io, **self.properties}

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """The settings as they may be shown, without passwords and keys."""
        yield from ((name, mask_setting(name, getattr(self, name))) for name in type(self).model_fields)


def checked_address(address: str, *, known: tuple[str, ...] | None = SCHEMES) -> str:
    """Return a folder's address in one spelling: an absolute path, file:///path, or scheme://bucket/path.

    `known` are the schemes beside file that are allowed. None: all.

    Raises:
        ValueError: it is none of these. A typo must not become a local folder.
    """
    listed = ", ".join(f"{scheme}://" for scheme in known or SCHEMES)
    wanted = f"expected a folder, file:///folder, or an address with one of the schemes {listed}, found {address!r}"
    if _CONTROL.search(address) or not address.strip():
        raise ValueError(f"{wanted}: write it without control characters")
    without_colon = _SCHEME_WITHOUT_COLON.match(address)
    if without_colon:
        raise ValueError(f"{wanted}: write {without_colon[1]}://bucket/path")
    found = _SCHEME.match(address)
    if found is None:
        return _absolute(address)
    scheme, slashes = found[1].lower(), found[2]
    rest = address[found.end() :]
    if scheme == "file":
        if len(slashes) not in (1, 3):
            raise ValueError(f"{wanted}: write file:///absolute/folder, or the folder alone")
        return f"file:///{rest}".rstrip("/") if rest else "file:///"
    if known is not None and scheme not in known:
        raise ValueError(f"{wanted}: correct the scheme; write ./{address} for a folder of that name")
    if (len(slashes) != 2 and not (len(slashes) == 3 and scheme in _NO_HOST)) or not rest:
        raise ValueError(f"{wanted}: write {scheme}://bucket/path; write ./{address} for a folder of that name")
    return f"{scheme}:{slashes}{rest}".rstrip("/")


def home_folder() -> Path:
    """Return the folder of the embedded lakehouse: $DLAC_HOME, else the nearest .dlac from here upwards, else a new one here.

    Another user's folder above is not used: its catalog would choose the files that this user writes.
    """
    if given := os.environ.get("DLAC_HOME"):
        return Path(given)
    warn_of_variables([name for name in os.environ if similar_name(name, _VARIABLES)], _VARIABLES, "DLAC")
    here = Path.cwd()
    found = (folder / _HOME for folder in here.parents if _is_own(folder / _HOME))
    return Path(_HOME) if (here / _HOME).exists() else next(found, Path(_HOME))


def _is_own(folder: Path) -> bool:
    try:
        return folder.is_dir() and folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def checked_home(home: Path) -> Path:
    """Return the home folder as an absolute path. Raises `SpecInvalid` if it is an address of something else, or a file."""
    found = _SCHEME.match(str(home))
    if (found is not None and found[2]) or _CONTROL.search(str(home)) or not str(home).strip():
        raise SpecInvalid(
            f"expected a local folder as home, found {str(home)!r}: name a folder with --home or DLAC_HOME; a bucket is named "
            "with lakehouse.warehouse and checkpoint.store in the job spec"
        )
    try:
        folder = Path(_absolute(str(home))).resolve()
    except (ValueError, OSError, RuntimeError) as err:
        raise SpecInvalid(
            f"expected a local folder as home, found {str(home)!r} ({err}): name one with --home"
        ) from err
    if folder.exists() and not folder.is_dir():
        raise SpecInvalid(f"expected a folder as home, found the file {str(folder)!r}: name a folder with --home")
    return folder


def sqlite_uri(path: str) -> str:
    """Return the address of an SQLite file. In an address `?` begins the parameters, and `%` is an escape."""
    return f"sqlite:///{path.replace('%', '%25').replace('?', '%3F')}"


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite catalog, or None for any other catalog."""
    head, _, _ = uri.partition("?")
    dialect, separator, path = head.partition(":///")
    if not separator or dialect.partition("+")[0] != "sqlite" or not path or path == ":memory:":
        return None
    return Path(unquote(path).removeprefix("file:").removeprefix("//"))


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as err:
        raise ValueError(f"expected a folder, found {path!r} ({err}): write the home folder out") from err


def _with_timeouts(uri: str) -> str:
    """Return an address whose connections end when the server does not answer. Its own parameters are kept."""
    dialect = uri.partition(":")[0]
    if dialect == "sqlite":
        wanted = {"timeout": "30"}
    elif dialect in _LIBPQ:
        wanted = _LIBPQ_TIMEOUTS
    else:
        return uri
    query = "&".join(f"{name}={value}" for name, value in wanted.items() if f"{name}=" not in uri)
    return uri + (("&" if "?" in uri else "?") + query if query else "")
